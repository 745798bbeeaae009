"""Divides a pipeline into independent parts, and assigns devices to each."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from distflow.errors import UserError, count_of
from distflow.graph import BoundPipeline
from distflow.graph.node_order import Edges, ancestors, dependents, topological_order

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)")


@dataclass(frozen=True)
class Part:
    """Nodes that run on the same devices, in order, and their engines. size: parameters of the
    models it trains."""

    nodes: tuple[str, ...]
    engines: tuple[str, ...]
    size: int


def split(deps: Edges, holds: Mapping[str, Collection[str]]) -> list[tuple[str, ...]]:
    """The irreducible parts of a graph: each exit with all it depends on; exits that share an
    engine are one part.

    A node without an engine that leads to several parts is in each. holds: the engines of each
    node; each engine exists once per run. Nodes of a part are in topological order, parts by their
    first exit in the order of `deps`.
    """
    before = ancestors(deps)
    after = dependents(deps)
    closures = [{exit_, *before[exit_]} for exit_ in deps if not after[exit_]]

    parts: list[set[str]] = []
    for nodes in closures:
        contents = _contents(nodes, holds)
        common = [part for part in parts if contents & _contents(part, holds)]
        for part in common[1:]:
            parts.remove(part)

        if common:
            common[0].update(nodes, *common[1:])
        else:
            parts.append(nodes)

    order = topological_order(deps)
    return [tuple(node for node in order if node in part) for part in parts]


def pipeline_parts(
    pipeline: BoundPipeline, sizes: Mapping[str, str | float], num_devices: int | None = None
) -> list[Part]:
    """The parts of a pipeline in the order in which they get devices: the largest model first, then
    the longest chain.

    If the rollout loop has an engine, it is in the part that trains the policy, and all parts read
    its output; else each part has that loop. A part without an engine joins the first part with
    one. If there are more parts than `num_devices`, all is one part. sizes: parameters of the model
    of each role.
    """
    rollout_nodes = tuple(node.node_id for node in pipeline.rollout_nodes)
    all_nodes = [node.node_id for node in pipeline.nodes]
    whole = [_part(pipeline, all_nodes, sizes)]
    holds = {node.node_id: node.engines for node in pipeline.nodes}
    generates = bool(_contents(rollout_nodes, holds))
    if not pipeline.training_nodes or (generates and "actor" not in pipeline.engines):
        return whole

    deps = {}
    for node in pipeline.training_nodes:
        deps[node.node_id] = tuple(dep for dep in node.deps if dep not in rollout_nodes)

    trained = []
    idle: set[str] = set()
    for nodes in split(deps, holds):
        if _contents(nodes, holds):
            trained.append(nodes)
        else:
            idle.update(nodes)

    if not trained:
        return whole
    if num_devices is not None and num_devices < len(trained):
        return whole

    parts = []
    for nodes in trained:
        if not generates or "actor" in _contents(nodes, holds):
            nodes = rollout_nodes + nodes
        parts.append(_part(pipeline, nodes, sizes))

    parts.sort(key=priority)
    first = {*parts[0].nodes, *idle}
    in_order = [node_id for node_id in all_nodes if node_id in first]
    return [_part(pipeline, in_order, sizes), *parts[1:]]


def priority(part: Part) -> tuple[int, int]:
    """Sort key: the part with the lowest gets devices first: the largest, then the one with the
    most nodes."""
    return -part.size, -len(part.nodes)


def apportion(sizes: Sequence[float], num_devices: int, strategy: str) -> list[int]:
    """Devices of each part, at least 1, all devices in total. Earlier parts get the remainder of a
    division.

    strategy: `even`, or `param_aware`: in proportion to `sizes`, by largest remainder; a part with
    a proportion below 1 gets 1, and the others share the rest. Raises UserError for too few
    devices.
    """
    if num_devices < len(sizes):
        raise UserError(
            f"the run has {len(sizes)} independent parts, but only "
            f"{count_of(num_devices, 'device')}: use at least {len(sizes)} (trainer.nnodes × "
            "trainer.n_gpus_per_node)"
        )

    weights = [Fraction(1)] * len(sizes)
    if strategy == "param_aware" and any(sizes):
        weights = [Fraction(size) for size in sizes]
    quotas = _quotas(weights, num_devices)
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda part: (shares[part] - quotas[part], part))
    for part in by_remainder[: num_devices - sum(shares)]:
        shares[part] += 1
    return shares


def parse_size(written: str | float) -> int:
    """Parameters of "70B", "500M", "0.5b" or a number. Raises UserError."""
    if isinstance(written, str):
        match = _WRITTEN.fullmatch(written.strip().upper())
        if match is None:
            raise UserError(
                f"'{written}' is not a model size; write e.g. 70B, 500M or a number of parameters"
            )
        return round(float(match[1]) * _UNITS[match[2]])

    if not 0 <= written < float("inf"):
        raise UserError(f"{written} is not a number of parameters")
    return round(written)


def _quotas(weights: list[Fraction], num_devices: int) -> list[Fraction]:
    """Devices of each part in proportion to its weight, and at least 1."""
    small: set[int] = set()
    while True:
        total = sum(weight for part, weight in enumerate(weights) if part not in small)
        left = num_devices - len(small)

        quotas = []
        below = set()
        for part, weight in enumerate(weights):
            quota = Fraction(1) if part in small else weight * left / total

            quotas.append(quota)
            if quota < 1:
                below.add(part)

        if not below:
            return quotas
        small |= below


def _part(
    pipeline: BoundPipeline, node_ids: Sequence[str], sizes: Mapping[str, str | float]
) -> Part:
    engines: dict[str, None] = {}
    for node_id in node_ids:
        engines.update(dict.fromkeys(pipeline.node(node_id).engines))

    size = 0
    for engine in engines:
        if engine != "rollout":  # which uses the actor's weights
            size += parse_size(sizes.get(engine, 0))

    return Part(tuple(node_ids), tuple(engines), size)


def _contents(nodes: Collection[str], holds: Mapping[str, Collection[str]]) -> set[str]:
    """The engines of nodes."""
    found: set[str] = set()
    for node in nodes:
        found.update(holds.get(node, ()))
    return found
