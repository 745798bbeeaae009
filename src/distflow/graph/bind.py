"""From a graph, a config and the data's columns to the frozen program."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from distflow.config.errors import hint
from distflow.graph.contract import Contract, Form, Wishes, canonical, read_contract
from distflow.graph.errors import PipelineError
from distflow.graph.fields import Axis, Field, find_field
from distflow.graph.functions import resolve_func
from distflow.graph.nodes import Node, early_contract, node_scope
from distflow.graph.options import (
    Group,
    check_options,
    check_own_config,
    group_of,
    groups_taken,
    lookup,
    resolve_options,
)
from distflow.graph.order import without
from distflow.graph.program import BoundNode, Program
from distflow.graph.spec import NodeSpec, as_names, spec_of
from distflow.graph.wiring import Vertex, Wiring

DataFields = Iterable[str] | Mapping[str, Field]


@dataclass(frozen=True)
class _Settled:
    """A node whose function and whose functions of the config are settled; `node.fn` and `node.spec` are the final."""

    node: Node
    group: Group
    chosen: bool


def bind_program(graph_id: str, nodes: tuple[Node, ...], config: Any, data_fields: DataFields) -> Program:
    """The program of a graph whose structure was checked.

    Raises PipelineError for a role without its config group, a function that cannot be chosen, an option without a
    value, a field that is read and that neither a node before nor the data have, and what `Wiring` checks.
    """
    kept = [node for node in nodes if _wanted(node, config)]
    if not kept:
        raise PipelineError(f"graph '{graph_id}': this config leaves out every node")
    skipped = [node for node in nodes if node not in kept]
    deps = without({node.node_id: node.deps for node in nodes}, {node.node_id for node in skipped})
    settled = {node.node_id: _settle(node, config) for node in kept}
    loaded = _loaded(data_fields)
    contracts = _contracts(settled, frozenset(loaded))
    vertices = {key: Vertex(s.node, contracts[key], deps[key]) for key, s in settled.items()}
    wiring = Wiring(vertices)
    _check_reads(wiring, settled, frozenset(loaded), skipped)
    bound = {key: _bind_node(vertices[key], settled[key], wiring) for key in wiring.order}
    conditions = {node.spec.when for node in nodes if isinstance(node.spec.when, str)}
    return Program(
        graph_id=graph_id,
        nodes=tuple(node for node, _ in bound.values()),
        skipped=tuple(node.node_id for node in skipped),
        fields={**{name: find_field(name) for name in wiring.writers}, **loaded},
        engines=frozenset(engine for node, _ in bound.values() for engine in node.engines),
        takes=frozenset(conditions).union(*(taken for _, taken in bound.values())),
    )


_T = TypeVar("_T")


def _ask(node: Node, what: str, function: Callable[[Any], _T], config: Any) -> _T:
    """Call a function of the config; what it finds wrong with the config is the user's error."""
    try:
        return function(config)
    except (ValueError, LookupError, AttributeError) as error:
        raise PipelineError(f"{node.where}: {what}: {error}") from error


def _wanted(node: Node, config: Any) -> bool:
    when = node.spec.when
    if when is None:
        return True
    if isinstance(when, str):
        return bool(lookup(config, when, f"{node.where}: when"))
    return bool(_ask(node, "when", when, config))


def _settle(node: Node, config: Any) -> _Settled:
    """Call the node's functions of the config and put the chosen function in place."""
    group = group_of(node, config)
    spec = _settle_spec(node, node.spec, config)
    if spec.chosen is None:
        return _Settled(_with(node, node.fn, spec), group, chosen=False)
    fn = resolve_func(_ask(node, "chosen", spec.chosen, config), f"{node.where}: chosen")
    own = _settle_spec(node, spec_of(fn), config)
    if own.chosen is not None:
        raise PipelineError(f"{node.where}: the function chosen for it, {fn!r}, chooses again; give the last one")
    merged = replace(
        own,
        writes=spec.writes if own.writes is None else own.writes,
        scope=own.scope or spec.scope,
        takes=tuple(dict.fromkeys((*as_names(spec.takes, node.where), *as_names(own.takes, node.where)))),
    )
    return _Settled(_with(node, fn, merged), group, chosen=True)


def _settle_spec(node: Node, spec: NodeSpec, config: Any) -> NodeSpec:
    def called(what: str, value: Any) -> Any:
        return _ask(node, what, value, config) if callable(value) else value

    return replace(
        spec,
        reads=called("reads", spec.reads),
        writes=called("writes", spec.writes),
        takes=as_names(called("takes", spec.takes), f"{node.where}: takes"),
    )


def _with(node: Node, fn: Callable[..., Any], spec: NodeSpec) -> Node:
    """The node with another function, everything else as it was settled."""
    other = copy(node)
    object.__setattr__(other, "fn", fn)
    object.__setattr__(other, "spec", spec)
    return other


def _contracts(settled: Mapping[str, _Settled], loaded: frozenset[str]) -> dict[str, Contract]:
    """Twice, since what a node may read as a field depends on what the others write."""

    def all_with(known: frozenset[str]) -> dict[str, Contract]:
        return {key: read_contract(s.node.fn, _wishes(s, known)) for key, s in settled.items()}

    written = frozenset(canonical(name) for contract in all_with(loaded).values() for name in contract.writes)
    contracts = all_with(loaded | written)
    for key, contract in contracts.items():
        check_options(settled[key].node, contract)
        check_own_config(settled[key].node, contract)
    return contracts


def _wishes(settled: _Settled, known: frozenset[str]) -> Wishes:
    node, group = settled.node, settled.group
    return Wishes(
        where=node.where,
        spec=node.spec,
        role=node.node_role,
        scope=node_scope(node),
        is_field=lambda name: canonical(name) in known or find_field(name) is not None,
        is_option=lambda name: name in node.options or group.has(name),
        chosen=settled.chosen,
    )


def _check_reads(wiring: Wiring, settled: Mapping[str, _Settled], loaded: frozenset[str], skipped: list[Node]) -> None:
    for node_id in wiring.order:
        for name in wiring.vertices[node_id].contract.reads:
            if not wiring.has(node_id, canonical(name), loaded):
                raise PipelineError(_missing(wiring, settled[node_id], name, loaded, skipped))


def _missing(wiring: Wiring, reader: _Settled, name: str, loaded: frozenset[str], skipped: list[Node]) -> str:
    """Says that a field is not there, and the likeliest reason."""
    said = f"{reader.node.where} reads '{name}', "
    for node in skipped:
        if canonical(name) in map(canonical, early_contract(node, frozenset()).writes):
            return f"{said}which only '{node.node_id}' writes, and this config leaves '{node.node_id}' out"
    before = [wiring.vertices[other] for other in wiring.order if other in wiring.before[reader.node.node_id]]
    known = {*loaded, *(written for vertex in before for written in vertex.writes), *reader.group.names()}
    said += f"but no node before it writes it and the data have no such column{hint(name, known)}"
    silent = [v.node.node_id for v in before if not v.writes and _may_write(v.contract)]
    return f"{said}; if '{silent[0]}' writes it, say so by @node(writes=...)" if silent else said


def _may_write(contract: Contract) -> bool:
    return contract.form is not Form.WIRED or "batch" in contract.reserved


def _bind_node(vertex: Vertex, settled: _Settled, wiring: Wiring) -> tuple[BoundNode, frozenset[str]]:
    """The bound node and the config keys that it takes."""
    node, contract, group = vertex.node, vertex.contract, settled.group
    options, keys = resolve_options(node, contract, group)
    bound = BoundNode(
        node_id=node.node_id,
        fn=node.fn,
        contract=contract,
        node_type=node.node_type,
        node_role=node.node_role,
        deps=vertex.deps,
        plane=wiring.planes[node.node_id],
        engines=vertex.engines,
        options=options,
        only_forward_compute=node.only_forward_compute,
        agent_group=node.agent_group,
        retry_limit=node.retry_limit,
        filter_plugin=node.filter_plugin,
        config=group.value,
    )
    return bound, keys.union(contract.takes or groups_taken(contract, group))


def _loaded(data_fields: DataFields) -> dict[str, Field]:
    """The data's columns; one that is not registered holds plain objects."""
    given = data_fields if isinstance(data_fields, Mapping) else {}
    columns: dict[str, Field] = {}
    for spelled in data_fields:
        name = canonical(spelled)
        columns[name] = given.get(spelled) or find_field(name) or Field(name, "object", Axis.OBJECT)
    return columns
