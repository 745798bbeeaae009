"""Binds a graph to a config and the data's columns: options of node functions, fields, and the frozen pipeline."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from types import SimpleNamespace, UnionType
from typing import Union, get_args, get_origin

from distflow.errors import hint
from distflow.graph.contract import REQUIRED, Contract, Declared, Form, canonical, read_contract
from distflow.graph.drawing import Box, flowchart, text_drawing
from distflow.graph.fields import Axis, Field, MissingColumn, PipelineError, find_field
from distflow.graph.node_spec import NodeRole, NodeType, Plane
from distflow.graph.nodes import Node, node_scope, resolve_factory
from distflow.graph.wiring import Vertex, Wiring


@dataclass(frozen=True)
class BoundNode:
    """A node under a config.

    fn: the function to run, which a factory made where one did. deps: the nodes that run before it, those that write
    what it reads among them. engines: those it uses. options: their values. phase: what its time is called.
    validates: a validation runs it as well. config: what its parameter `config` receives; config_key: the dotted key
    of that ("" is all, None is the node's own mapping).
    """

    node_id: str
    fn: Callable[..., object]
    contract: Contract
    node_type: NodeType
    node_role: NodeRole
    deps: tuple[str, ...]
    plane: Plane
    engines: tuple[str, ...]
    options: Mapping[str, object]
    retry_limit: int
    phase: str
    validates: bool
    config: object
    config_key: str | None


@dataclass(frozen=True)
class BoundPipeline:
    """The nodes in one deterministic topological order, and what they use.

    fields: the field of each column that a node writes or the data have. engines, services: those that some node uses.
    """

    graph_id: str
    nodes: tuple[BoundNode, ...]
    fields: Mapping[str, Field]
    engines: frozenset[str]
    services: frozenset[str]

    @property
    def rollout_nodes(self) -> tuple[BoundNode, ...]:
        """The nodes that run for each prompt group."""
        return tuple(node for node in self.nodes if node.plane == "rollout")

    @property
    def training_nodes(self) -> tuple[BoundNode, ...]:
        """The nodes that run for each step, on every training rank."""
        return tuple(node for node in self.nodes if node.plane == "training")

    def node(self, node_id: str) -> BoundNode:
        """Raises PipelineError if the pipeline has no such node."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        ids = [node.node_id for node in self.nodes]
        raise PipelineError(f"pipeline '{self.graph_id}' has no node '{node_id}'{hint(node_id, ids)}")

    def to_json(self) -> list[dict[str, object]]:
        """Each node as plain data: its kind, dependencies, and what it reads and writes."""
        return [
            {
                "name": node.node_id,
                "role": node.node_role.name,
                "plane": node.plane,
                "phase": node.phase,
                "deps": node.deps,
                "engines": node.engines,
                "reads": [*node.contract.reads, *node.contract.optional],
                "writes": node.contract.writes,
            }
            for node in self.nodes
        ]

    def to_mermaid(self) -> str:
        """The pipeline as a Mermaid flowchart with its planes; an edge shows the fields that it carries."""
        return flowchart(self._boxes())

    def to_text(self) -> str:
        """The same as text, for a terminal."""
        return text_drawing(self._boxes())

    def _boxes(self) -> list[Box]:
        return [Box(n.node_id, n.node_role.name, n.contract, n.deps, n.plane, n.engines) for n in self.nodes]


_PLAIN_TYPES = {t.__name__: t for t in (bool, int, float, str)}


@dataclass(frozen=True)
class ConfigGroup:
    """The part of the config that a node receives. `key` is its dotted key: "" for all, None if it is the node's
    own."""

    value: object
    key: str | None

    def has(self, name: str) -> bool:
        return name in dir(self.value)  # by name only: reading the value would count as using the key

    def names(self) -> list[str]:
        return [name for name in dir(self.value) if not name.startswith("_")]


def lookup(config: object, key: str, where: str) -> object:
    """The value of a dotted key. Raises PipelineError with the nearest key."""
    value = config
    for part in key.split(".") if key else ():
        names = [name for name in dir(value) if not name.startswith("_")]
        attribute = part if part in names else f"{part}_"  # `async` is `async_` in Python
        if attribute not in names:
            raise PipelineError(f"{where}: the config has no '{part}' (of '{key}'){hint(part, names)}")
        value = getattr(value, attribute)
    return value


def group_of(node: Node, config: object) -> ConfigGroup:
    """The config group that the node receives: its own, the one it names, or its role's."""
    if isinstance(node.config, Mapping):
        return ConfigGroup(SimpleNamespace(**node.config), None)
    key = node.by_role.config if node.config is None else node.config
    return ConfigGroup(lookup(config, key, f"{node.where} of role {node.node_role.name}"), key)


_SETTINGS = tuple(item.name for item in fields(Node) if item.init and item.name != "options")
_NOT_HERE = {
    "agent_group": "is not implemented yet: it will come with several agents in one pipeline",
    "filter_plugin": "has no meaning here: a filter is a node of its own, whose function returns Drop(reason) for a "
    "prompt group",
}
"""Arguments of other systems' `add_node`."""


def check_options(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an option that the function does not take or that has another type."""
    for name, value in node.options.items():
        if name in contract.options or contract.open_options:
            _check_type(node, contract, name, value)
        elif name in _NOT_HERE:
            raise PipelineError(f"{node.where}: '{name}' {_NOT_HERE[name]}")
        else:
            known = [*contract.options, *_SETTINGS]
            raise PipelineError(f"{node.where}: its function takes no option '{name}'{hint(name, known)}")


def check_own_config(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an entry of the node's own `config` mapping that its function cannot receive."""
    if not isinstance(node.config, Mapping) or contract.open_options or "config" in contract.reserved:
        return
    for name in node.config:
        if name not in contract.options:
            raise PipelineError(
                f"{node.where}: config has '{name}', which its function does not take{hint(name, contract.options)}"
            )


def resolve_options(node: Node, contract: Contract, group: ConfigGroup) -> dict[str, object]:
    """Values of all options.

    `add_node` and a `functools.partial` take precedence over the group, and that over the function's default.

    Raises PipelineError for an option without a value.
    """
    preset = node.fn.keywords if isinstance(node.fn, functools.partial) else {}
    fixed = {**{name: value for name, value in preset.items() if name in contract.options}, **node.options}
    values: dict[str, object] = {}
    for name, default in contract.options.items():
        if name in fixed:
            continue
        if group.has(name):
            values[name] = getattr(group.value, name)
        elif default is not REQUIRED:
            values[name] = default
        else:
            where = "its config" if group.key is None else f"config group '{group.key}'" if group.key else "the config"
            raise PipelineError(
                f"{node.where}: option '{name}' has no value: add_node gives none, {where} has no such key"
                f"{hint(name, group.names())}, and the function has no default"
            )
    return {**values, **fixed}


def _check_type(node: Node, contract: Contract, name: str, value: object) -> None:
    wanted = _plain_types(node, name) if name in contract.options else ()
    if not wanted or value is None:
        return
    fits = type(value) in wanted or (isinstance(value, int) and not isinstance(value, bool) and float in wanted)
    if not fits:
        names = " or ".join(t.__name__ for t in wanted)
        raise PipelineError(f"{node.where}: option '{name}' must be {names}, {value!r} given")


def _plain_types(node: Node, name: str) -> tuple[type, ...]:
    """bool, int, float, str by the parameter's annotation; empty for another one."""
    try:
        parameter = signature(node.fn).parameters.get(name)
    except (ValueError, TypeError):
        return ()
    annotation = Parameter.empty if parameter is None else parameter.annotation
    if isinstance(annotation, str):  # postponed annotations
        words = [part.strip() for part in annotation.split("|")]
        parts: tuple[object, ...] = tuple(_PLAIN_TYPES.get(word, word) for word in words)
    else:
        parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = tuple(part for part in parts if isinstance(part, type) and part in _PLAIN_TYPES.values())
    none = sum(part in (None, "None", type(None)) for part in parts)
    return plain if len(plain) + none == len(parts) else ()


DataFields = Iterable[str] | Mapping[str, Field]


@dataclass(frozen=True)
class _Settled:
    """A node with a known function, and its part of the config."""

    node: Node
    group: ConfigGroup


def bind_pipeline(graph_id: str, nodes: tuple[Node, ...], config: object, data_fields: DataFields) -> BoundPipeline:
    """The pipeline of a graph whose structure was checked.

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
    return BoundPipeline(
        graph_id=graph_id,
        nodes=bound,
        fields=loaded | _written(wiring),
        engines=frozenset(engine for node in bound for engine in node.engines),
        services=frozenset(service for node in bound for service in node.contract.services),
    )


def bind_alone(node: Node, config: object) -> BoundNode:
    """A node outside of a graph: the caller provides its columns. Raises PipelineError as `bind_pipeline` does."""
    settled = _settle(node, config)
    contract = read_contract(settled.node.fn, _declared(settled, frozenset()))
    return _bind_node(Wiring({node.node_id: Vertex(settled.node, contract, ())}), settled)


def _settle(node: Node, config: object) -> _Settled:
    node = resolve_factory(node, config)
    return _Settled(node, group_of(node, config))


def _contracts(settled: Mapping[str, _Settled], loaded: frozenset[str]) -> dict[str, Contract]:
    """Settle contracts twice, since the fields that a node may read depend on what the others write."""

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
    """Message that a field is missing, with the likeliest reason."""
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
    """The field of each written column. Raises PipelineError for an undeclared one."""
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
