"""A node with separate settings for some domains: each runs on its own rows, and results are merged
in batch order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from typing import Any, cast

import torch

from distflow.config import Config
from distflow.config.derived_settings import algorithms, config_of
from distflow.config.keys.algorithm import AlgorithmConfig
from distflow.config.keys.declare import is_group
from distflow.data.batch import Batch, Written
from distflow.graph import BoundNode, Node, NodeOutput, node, node_factory
from distflow.graph.bind_to_config import bind_alone
from distflow.runtime.compiled_node import compile_inputs
from distflow.runtime.node_context import NodeContext
from distflow.runtime.step_metrics import over_ranks
from distflow.training.engine import Collective

Factory = Callable[[Config], Callable[..., object]]


def by_domain(is_on: Callable[[AlgorithmConfig], bool]) -> Callable[[Factory], Factory]:
    """Decorates a factory. If no domain differs and no mask narrows baselines, it returns its
    function for the config. Otherwise it returns a node function that runs, on the rows of each
    domain in `algorithm.domains`, the function for its settings, and on all other rows that for the
    run's; samples outside of `in_baselines` are not valid there.

    is_on: whether the node has an effect under some settings; otherwise it leaves its columns
    unchanged.
    """

    def decorated(make: Factory) -> Factory:
        @wraps(make)
        def factory(config: Config) -> Callable[..., object]:
            is_divided = config.algorithm.domains or _narrows_baselines(config)
            if is_divided:
                return _divided(make, is_on, config)
            return make(config)

        return factory

    return decorated


def algorithm_node(
    is_on: Callable[[AlgorithmConfig], bool],
) -> Callable[[Callable[..., object]], Factory]:
    """Decorates a node function whose keyword-only parameters are keys of `algorithm`; a group of
    keys is passed as a mapping. Returns the factory that passes their values, in each domain its
    own. is_on: as in `by_domain`."""

    def decorated(function: Callable[..., object]) -> Factory:
        parameters = signature(function).parameters.values()
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]

        @wraps(function)
        def make(config: Config) -> Callable[..., object]:
            options = dict[str, object]()
            for name in names:
                value = getattr(config.algorithm, name)
                if is_group(value):
                    options[name] = dict(vars(value))
                else:
                    options[name] = value

            if options:
                return partial(function, **options)
            return function

        return node_factory(by_domain(is_on)(make))

    return decorated


def _divided(
    make: Factory, is_on: Callable[[AlgorithmConfig], bool], config: Config
) -> Callable[..., object]:
    parts: dict[str | None, BoundNode | None] = {}
    reads = {"domain": None}
    optional = dict[str, None]()
    writes = dict[str, None]()
    for domain, algorithm in algorithms(config):
        parts[domain] = None
        if is_on(algorithm):
            own = config_of(config, domain)
            part = bind_alone(Node(make.__name__, make(own)), own)
            reads |= dict.fromkeys(part.contract.reads)
            optional |= dict.fromkeys(part.contract.optional)
            writes |= dict.fromkeys(part.contract.writes)
            parts[domain] = part

    if _narrows_baselines(config) and "in_baselines" not in writes:
        reads["in_baselines"] = None
    names = (*reads, *(f"?{name}" for name in optional if name not in reads))
    return node(reads=names, writes=tuple(writes))(partial(in_domains, parts=parts))


def in_domains(
    batch: Batch,
    ctx: NodeContext,
    reduce: Collective,
    *,
    parts: Mapping[str | None, BoundNode | None],
) -> NodeOutput:
    """parts: the function by domain, None for all others. Every rank runs all, in this order, even
    without rows: they may sum over the ranks. A part's metrics are over all ranks and end in its
    domain; it has its own state."""
    writes = next(part.contract.writes for part in parts.values() if part is not None)
    rows: dict[str | None, list[int]] = {domain: [] for domain in parts}
    for row, domain in enumerate(batch["domain"]):
        rows[domain if domain in parts else None].append(row)

    done = list[Batch]()
    order = list[int]()
    metrics = dict[str, float]()
    for domain, part in parts.items():
        own = batch.select(rows[domain])
        order += rows[domain]
        if "in_baselines" in own:
            own["valid"] = own["in_baselines"]

        if part is not None:
            output = run_part(part, own, replace(ctx, state=_state_of(domain, ctx)), reduce)
            if output.weight is None:
                weight = float(len(own))
            else:
                weight = output.weight

            end = "" if domain is None else f"/{domain}"
            measured = over_ranks([(dict(output.metrics), weight)], reduce)
            metrics |= {f"{name}{end}": value for name, value in measured.items()}
            for name, value in columns_of(output.batch, writes).items():
                own[name] = value

        done.append(own.only(writes))

    in_order = torch.tensor(order, dtype=torch.int64).argsort()
    return NodeOutput(Batch.concat(done).select(in_order), metrics)


def _state_of(domain: str | None, ctx: NodeContext) -> dict[str, Any]:
    """The part's own state, within that of the node."""
    if domain is None:
        return cast(dict[str, Any], ctx.state.setdefault("rest", {}))
    domains = ctx.state.setdefault("domains", {})
    return cast(dict[str, Any], domains.setdefault(domain, {}))


def run_part(part: BoundNode, batch: Batch, ctx: NodeContext, reduce: Collective) -> NodeOutput:
    """What the function of a node within a node returns for a batch."""
    arguments = compile_inputs(part, {"reduce": reduce})(batch, {"batch": batch, "ctx": ctx})
    returned = part.fn(**arguments)
    if isinstance(returned, NodeOutput):
        return returned
    return NodeOutput(returned)


def masks_samples(algorithm: AlgorithmConfig) -> bool:
    return (
        algorithm.mask_truncated
        or algorithm.mask_max_turns
        or algorithm.difficulty_mask is not None
        or algorithm.mask_long_errors is not None
    )


def _narrows_baselines(config: Config) -> bool:
    """Whether masked samples are also excluded from baselines."""
    return any(
        masks_samples(algorithm) and algorithm.mask_type == "all"
        for _, algorithm in algorithms(config)
    )


def options_of(bound: BoundNode, domain: str | None) -> dict[str, object]:
    """The options of the function that runs for the domain. domain: None for all without their own
    settings."""
    parts = bound.options.get("parts")
    part = parts.get(domain) if isinstance(parts, Mapping) else bound
    return dict(part.options) if part is not None else {}


def columns_of(output: object, writes: Sequence[str]) -> dict[str, Written]:
    """The columns that a node function returned, by name."""
    if isinstance(output, Batch):
        return {name: output.flat(name) for name in writes}
    if isinstance(output, Mapping):
        return dict(output)
    values = output if isinstance(output, tuple) else (output,)
    return dict(zip(writes, values, strict=True))
