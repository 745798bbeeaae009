"""Binds a graph to a config and the data's columns: options of node functions, fields, and the
frozen pipeline."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any

from distflow.errors import MissingColumn, PipelineError, hint
from distflow.graph.contract_from_signature import REQUIRED, Contract
from distflow.graph.drawing import Box, flowchart, text_drawing
from distflow.graph.fields import Axis, Field, canonical, find_field
from distflow.graph.graph_node import (
    NODE_SETTINGS,
    Node,
    contract_of,
    contracts_of,
    resolve_factory,
)
from distflow.graph.node_roles import NodeRole, NodeType, Plane
from distflow.graph.wiring import Wiring


@dataclass(frozen=True)
class BoundNode:
    """A node under a config."""

    node_id: str
    fn: Callable[..., object]
    """The function to run, or what its factory returned."""
    contract: Contract
    node_type: NodeType
    node_role: NodeRole
    deps: tuple[str, ...]
    """The nodes that run before it, including writers of what it reads."""
    plane: Plane
    engines: tuple[str, ...]
    """Those that it uses."""
    options: Mapping[str, object]
    """Values by name."""
    retry_limit: int
    phase: str
    """The name of its time metric."""
    validates: bool
    """Whether validation runs it too."""
    config: object
    """The value of its parameter `config`."""
    config_key: str | None
    """The dotted key of that; "" is the whole config, None the node's own mapping."""
    keys: tuple[str, ...]
    """The keys and groups of the config that its options have their values from."""
    given: Callable[..., object]
    """Its function in the graph, which may be a factory of `fn`."""


@dataclass(frozen=True)
class BoundPipeline:
    """The nodes of a graph, and what they use."""

    graph_id: str
    nodes: tuple[BoundNode, ...]
    """In one deterministic topological order."""
    fields: Mapping[str, Field]
    """Of each column in the data or written by a node."""
    engines: frozenset[str]
    """All that nodes use, as `services`."""
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
        raise PipelineError(
            f"pipeline '{self.graph_id}' has no node '{node_id}'{hint(node_id, ids)}"
        )

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
        """A Mermaid flowchart grouped by plane; edges show the fields that they carry."""
        return flowchart(self._boxes())

    def to_text(self) -> str:
        return text_drawing(self._boxes())

    def _boxes(self) -> list[Box]:
        return [
            Box(n.node_id, n.node_role.name, n.contract, n.deps, n.plane, n.engines)
            for n in self.nodes
        ]


@dataclass(frozen=True)
class _ConfiguredNode:
    """A node with its function, and the part of the config that it receives."""

    node: Node
    config: object
    config_key: str | None
    """Its dotted key; "" for the whole config, None if it is the node's own mapping."""
    given: Callable[..., object]
    """Its function before a factory was called."""

    def names(self) -> list[str]:
        """The keys of its config."""
        return [name for name in dir(self.config) if not name.startswith("_")]


def _configure(node: Node, config: object) -> _ConfiguredNode:
    """The node with its own config, the config group that it names, or its role's group. Raises
    PipelineError with the nearest key for a group that does not exist."""
    given = node.fn
    node = resolve_factory(node, config)
    if isinstance(node.config, Mapping):
        return _ConfiguredNode(node, SimpleNamespace(**node.config), None, given)

    key = node.by_role.config if node.config is None else node.config
    if key:
        for part in key.split("."):
            names = [name for name in dir(config) if not name.startswith("_")]
            attribute = part if part in names else f"{part}_"  # `async` is `async_` in Python
            if attribute not in names:
                where = f"{node.where} of role {node.node_role.name}"
                raise PipelineError(
                    f"{where}: the config has no '{part}' (of '{key}'){hint(part, names)}"
                )

            config = getattr(config, attribute)

    return _ConfiguredNode(node, config, key, given)


_NOT_HERE = {
    "agent_group": "does not exist: the agents of an episode are declared in "
    "actor_rollout_ref.rollout.agents, and "
    "independent policies have policy=NAME",
    "filter_plugin": (
        "does not exist: a filter is a node whose function returns Drop(reason) for a prompt group"
    ),
}
"""Arguments of other systems' `add_node`."""


def check_options(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an option that the function does not take, or whose value is not of
    the type that the function declares."""
    given = dict(node.own_options)
    if isinstance(node.config, Mapping) and "config" not in contract.reserved:
        given |= node.config
    declared = _annotations(node.fn)

    for name, value in given.items():
        if name in contract.options or contract.open_options:
            kind = declared.get(name)
            is_default = value is contract.options.get(name)  # None may stand for any type
            if kind is not None and not is_default and not _is_of(kind, value):
                raise PipelineError(
                    f"{node.where}: option '{name}' is {value!r}, and its function declares "
                    f"{kind.__name__}"
                )

            continue

        if name in _NOT_HERE:
            raise PipelineError(f"{node.where}: '{name}' {_NOT_HERE[name]}")

        known = [*contract.options, *NODE_SETTINGS]
        raise PipelineError(
            f"{node.where}: its function takes no option '{name}'{hint(name, known)}"
        )


_KINDS: dict[Any, type] = {bool: bool, int: Integral, float: Real, str: str}
"""The annotations that are compared with values, and what a value must be."""


def _is_of(kind: Any, value: object) -> bool:
    return isinstance(value, _KINDS[kind]) and (kind is bool or not isinstance(value, bool))


def _annotations(fn: Callable[..., object]) -> dict[str, Any]:
    """The types of a function's parameters that are in `_KINDS`; empty if they cannot be read."""
    try:
        parameters = inspect.signature(fn, eval_str=True).parameters
    except (ValueError, TypeError, NameError, AttributeError):
        return {}

    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and kind in _KINDS:
            found[name] = kind

    return found


def _resolve_options(
    configured: _ConfiguredNode, contract: Contract
) -> tuple[dict[str, object], list[str]]:
    """Values of all options: from `add_node` or a `functools.partial`, else from the config, else
    the default. Also the dotted keys of the values from the config.

    Raises PipelineError for an option without a value.
    """
    node = configured.node
    key = configured.config_key

    fixed: dict[str, object] = {}
    if isinstance(node.fn, functools.partial):
        for name, value in node.fn.keywords.items():
            if name in contract.options:
                fixed[name] = value
    fixed |= node.own_options

    values: dict[str, object] = {}
    keys = list[str]()
    for name, default in contract.options.items():
        if name in fixed:
            continue

        if name in dir(configured.config):
            values[name] = getattr(configured.config, name)
            if key is not None:
                keys.append(f"{key}.{name}" if key else name.removesuffix("_"))
        elif default is not REQUIRED:
            values[name] = default
        else:
            where = f"config group '{key}'" if key else "its config"
            raise PipelineError(
                f"{node.where}: option '{name}' has no value: add_node gives none, {where} has no "
                f"such key{hint(name, configured.names())}, and the function has no default"
            )

    return {**values, **fixed}, keys


DataFields = Iterable[str] | Mapping[str, Field]


def bind_pipeline(
    graph_id: str, nodes: Iterable[Node], config: object, data_fields: DataFields
) -> BoundPipeline:
    """The pipeline of a graph whose structure was checked.

    Raises PipelineError for a role without its config group, a factory that rejects the config, an
    option without a value, an undeclared column, a field that is read but neither written before
    nor in the data, and what `Wiring` checks.
    """
    configured = {node.node_id: _configure(node, config) for node in nodes}
    resolved = {key: found.node for key, found in configured.items()}
    loaded = _loaded(data_fields)
    contracts = contracts_of(
        resolved, loaded, {key: dir(found.config) for key, found in configured.items()}
    )
    for key, contract in contracts.items():
        check_options(resolved[key], contract)
    wiring = Wiring(resolved, contracts)
    wiring.check()

    for node_id in wiring.order:
        for name in contracts[node_id].reads:
            columns = wiring.columns(node_id, loaded)
            if canonical(name) not in columns:
                known = {*columns, *configured[node_id].names()}
                raise MissingColumn(
                    f"{resolved[node_id].where} reads '{name}', but the data has no such column "
                    "and no earlier node declares that it writes it "
                    f"(@node(writes=...)){hint(name, known)}",
                    canonical(name),
                )

    bound = tuple(_bind_node(wiring, configured[key]) for key in wiring.order)
    return BoundPipeline(
        graph_id=graph_id,
        nodes=bound,
        fields=loaded | _written(wiring),
        engines=frozenset(chain.from_iterable(node.engines for node in bound)),
        services=frozenset(chain.from_iterable(node.contract.services for node in bound)),
    )


def bind_alone(node: Node, config: object) -> BoundNode:
    """A node outside of a graph: the caller provides its columns. Raises PipelineError as
    `bind_pipeline` does."""
    configured = _configure(node, config)
    contract = contract_of(configured.node, config=dir(configured.config))
    return _bind_node(Wiring({node.node_id: configured.node}, {node.node_id: contract}), configured)


def _written(wiring: Wiring) -> dict[str, Field]:
    """The field of each written column. Raises PipelineError for an undeclared one."""
    written: dict[str, Field] = {}
    for name, writers in wiring.writers.items():
        field = find_field(name)
        if field is None:
            raise PipelineError(
                f"node '{writers[0]}' writes '{name}', a column that is not declared, so its axis "
                "is unknown. Declare "
                f'it by @node(writes={{"{name}": "sample"}}) (or "response", "prompt", "sequence", '
                '"object"), or '
                f'with register_field("{name}", ...)'
            )

        written[name] = field

    return written


def _bind_node(wiring: Wiring, configured: _ConfiguredNode) -> BoundNode:
    node = configured.node
    vertex = wiring.vertices[node.node_id]
    by_role = node.by_role
    role_phase = (by_role.forward_phase if node.only_forward_compute else None) or by_role.phase
    options, keys = _resolve_options(configured, vertex.contract)

    return BoundNode(
        node_id=node.node_id,
        fn=node.fn,
        contract=vertex.contract,
        node_type=node.node_type,
        node_role=node.node_role,
        deps=wiring.deps[node.node_id],
        plane=wiring.planes[node.node_id],
        engines=vertex.engines,
        options=options,
        retry_limit=node.retry_limit,
        phase=node.phase or role_phase or node.node_id,
        validates=by_role.validates if node.validates is None else node.validates,
        config=configured.config,
        config_key=configured.config_key,
        keys=tuple(keys),
        given=configured.given,
    )


def _loaded(data_fields: DataFields) -> dict[str, Field]:
    """The fields of the data's columns; unregistered columns hold plain objects."""
    given = data_fields if isinstance(data_fields, Mapping) else {}
    names = {canonical(name): name for name in data_fields}
    return {
        name: given.get(spelled) or find_field(name) or Field(name, "object", Axis.OBJECT)
        for name, spelled in names.items()
    }
