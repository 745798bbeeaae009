"""From a graph, a config and the data's columns to the frozen program."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distflow.config.errors import hint
from distflow.graph.contract import Contract, Declared, Form, canonical, read_contract
from distflow.graph.errors import MissingColumn, PipelineError
from distflow.graph.fields import Axis, Field, find_field
from distflow.graph.nodes import Node, made, node_scope
from distflow.graph.options import ConfigGroup, check_options, check_own_config, group_of, resolve_options
from distflow.graph.program import BoundNode, Program
from distflow.graph.wiring import Vertex, Wiring

DataFields = Iterable[str] | Mapping[str, Field]


@dataclass(frozen=True)
class _Settled:
    """A node whose function is known, and what it receives of the config."""

    node: Node
    group: ConfigGroup


def bind_program(graph_id: str, nodes: tuple[Node, ...], config: object, data_fields: DataFields) -> Program:
    """The program of a graph whose structure was checked.

    Raises PipelineError for a role without its config group, a factory that finds fault with the config, an option
    without a value, a column that is not declared, a field that is read and that neither a node before nor the data
    have, and what `Wiring` checks.
    """
    settled = {node.node_id: _settle(node, config) for node in nodes}
    loaded = _loaded(data_fields)
    contracts = _contracts(settled, frozenset(loaded))
    wiring = Wiring({key: Vertex(s.node, contracts[key], s.node.deps) for key, s in settled.items()})
    wiring.check()
    _check_reads(wiring, settled, frozenset(loaded))
    bound = tuple(_bind_node(wiring, settled[key]) for key in wiring.order)
    return Program(
        graph_id=graph_id,
        nodes=bound,
        fields=loaded | _written(wiring),
        engines=frozenset(engine for node in bound for engine in node.engines),
        services=frozenset(service for node in bound for service in node.contract.services),
    )


def bind_alone(node: Node, config: object) -> BoundNode:
    """A node outside of a graph: whoever calls it sees to its columns. Raises PipelineError as `bind_program` does."""
    settled = _settle(node, config)
    contract = read_contract(settled.node.fn, _declared(settled, frozenset()))
    return _bind_node(Wiring({node.node_id: Vertex(settled.node, contract, ())}), settled)


def _settle(node: Node, config: object) -> _Settled:
    node = made(node, config)
    return _Settled(node, group_of(node, config))


def _contracts(settled: Mapping[str, _Settled], loaded: frozenset[str]) -> dict[str, Contract]:
    """Twice, since what a node may read as a field depends on what the others write."""

    def all_with(known: frozenset[str]) -> dict[str, Contract]:
        return {key: read_contract(s.node.fn, _declared(s, known)) for key, s in settled.items()}

    written = frozenset(canonical(name) for contract in all_with(loaded).values() for name in contract.writes)
    contracts = all_with(loaded | written)
    for key, contract in contracts.items():
        check_options(settled[key].node, contract)
        check_own_config(settled[key].node, contract)
    return contracts


def _declared(settled: _Settled, known: frozenset[str]) -> Declared:
    node, group = settled.node, settled.group
    return Declared(
        where=node.where,
        spec=node.spec,
        role=node.node_role,
        scope=node_scope(node),
        is_field=lambda name: canonical(name) in known or find_field(name) is not None,
        is_option=lambda name: name in node.options or group.has(name),
    )


def _check_reads(wiring: Wiring, settled: Mapping[str, _Settled], loaded: frozenset[str]) -> None:
    for node_id in wiring.order:
        for name in wiring.vertices[node_id].contract.reads:
            if not wiring.has(node_id, canonical(name), loaded):
                raise MissingColumn(_missing(wiring, settled[node_id], name, loaded), canonical(name))


def _missing(wiring: Wiring, reader: _Settled, name: str, loaded: frozenset[str]) -> str:
    """Says that a field is not there, and the likeliest reason."""
    said = f"{reader.node.where} reads '{name}', "
    before = [wiring.vertices[other] for other in wiring.order if other in wiring.before[reader.node.node_id]]
    known = {*loaded, *(written for vertex in before for written in vertex.writes), *reader.group.names()}
    said += f"but no node before it writes it and the data have no such column{hint(name, known)}"
    others = [node_id for node_id in wiring.order if node_id != reader.node.node_id]
    silent = [n for n in others if not wiring.vertices[n].writes and _may_write(wiring.vertices[n].contract)]
    return f"{said}; if '{silent[0]}' writes it, say so by @node(writes=...)" if silent else said


def _may_write(contract: Contract) -> bool:
    return contract.form is not Form.WIRED or "batch" in contract.reserved


def _written(wiring: Wiring) -> dict[str, Field]:
    """What each written column is. Raises PipelineError for one that nobody declared."""
    written: dict[str, Field] = {}
    for name, writers in wiring.writers.items():
        field = find_field(name)
        if field is None:
            raise PipelineError(
                f"node '{writers[0]}' writes '{name}', a column that is not declared: what one entry of it belongs to "
                f'would be guessed from its shape. Declare it by @node(writes={{"{name}": "sample"}}) (or "response", '
                f'"prompt", "sequence", "object"), or by register_field("{name}", ...)'
            )
        written[name] = field
    return written


def _bind_node(wiring: Wiring, settled: _Settled) -> BoundNode:
    node, group = settled.node, settled.group
    vertex = wiring.vertices[node.node_id]
    by_role = node.by_role
    role_phase = (by_role.forward_phase if node.only_forward_compute else None) or by_role.phase
    return BoundNode(
        node_id=node.node_id,
        fn=node.fn,
        contract=vertex.contract,
        node_type=node.node_type,
        node_role=node.node_role,
        deps=wiring.deps[node.node_id],
        plane=wiring.planes[node.node_id],
        engines=vertex.engines,
        options=resolve_options(node, vertex.contract, group),
        retry_limit=node.retry_limit,
        phase=node.phase or role_phase or node.node_id,
        validates=by_role.validates if node.validates is None else node.validates,
        config=group.value,
        config_key=group.key,
    )


def _loaded(data_fields: DataFields) -> dict[str, Field]:
    """The data's columns; one that is not registered holds plain objects."""
    given = data_fields if isinstance(data_fields, Mapping) else {}
    columns: dict[str, Field] = {}
    for spelled in data_fields:
        name = canonical(spelled)
        columns[name] = given.get(spelled) or find_field(name) or Field(name, "object", Axis.OBJECT)
    return columns
