"""The node of a graph, and what a node function may return."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distflow.graph.contract import Contract, Form, Wishes, canonical, read_contract
from distflow.graph.errors import PipelineError
from distflow.graph.fields import find_field
from distflow.graph.functions import resolve_func
from distflow.graph.roles import (
    ENGINE_TYPES,
    MARKER_TYPES,
    ROLE_ENGINE,
    TRAIN_ENGINES,
    NodeRole,
    NodeType,
    Scope,
)
from distflow.graph.spec import NodeSpec, as_member, as_names, check_scope, spec_of


@dataclass(frozen=True)
class NodeOutput:
    """What a node function may return: the batch (or a mapping of columns) and metrics of this call."""

    batch: Any
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Drop:
    """Returned by a node of the experience plane: the group leaves the run; a new one may start.

    reason: a short name that is counted (`async/dropped/REASON`). detail: what happened to this group, for people.
    """

    reason: str
    detail: str = ""


def same_batch(batch: Any) -> Any:
    """The function of a marker node: in one process an exchange or a barrier changes nothing."""
    return batch


@dataclass(frozen=True)
class Node:
    """One function of a graph, and what `add_node` said about it.

    node_id: its name. deps: the nodes that must have run. func: the function or where it is; None for markers.
    node_type: told by the engines of the function if not given. node_role: that of `@node` if not given, else DEFAULT.
    only_forward_compute: it computes with a train engine but changes no weights.
    config: what it receives in place of its role's config group: a dotted key of the config, or a mapping of its own.
    agent_group: which agents it serves. retry_limit: how often it runs again after a failure.
    filter_plugin: `(SampleInfo) -> bool` or where it is, which samples it takes from an exchange between workers.
    scope: overrides the function's. options: values for the function's options.
    Raises PipelineError if an argument has a wrong type or the function is not found.
    """

    node_id: str
    func: str | Callable[..., Any] | None = None
    deps: tuple[str, ...] = ()
    node_type: NodeType = None  # type: ignore[assignment]  # settled below, as node_role
    node_role: NodeRole = None  # type: ignore[assignment]
    only_forward_compute: bool = False
    config: str | Mapping[str, Any] | None = None
    agent_group: int = 0
    retry_limit: int = 0
    filter_plugin: Callable[..., bool] | None = None
    scope: Scope | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fn: Callable[..., Any] = field(init=False, repr=False, compare=False)
    spec: NodeSpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = self.where
        _check_arguments(self)
        settle = object.__setattr__
        settle(self, "deps", tuple(self.deps))
        settle(self, "options", dict(self.options))
        if self.node_type is not None:
            settle(self, "node_type", as_member(NodeType, self.node_type, f"{where}: node_type"))
        if self.node_role is not None:
            settle(self, "node_role", as_member(NodeRole, self.node_role, f"{where}: node_role"))
        settle(self, "fn", self._resolve())
        settle(self, "spec", spec_of(self.fn))
        if self.filter_plugin is not None:
            settle(self, "filter_plugin", resolve_func(self.filter_plugin, f"{where}: filter_plugin"))
        self._settle_role_and_type()

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"node {self.node_id!r}"

    def _resolve(self) -> Callable[..., Any]:
        if self.func is None and self.node_type in MARKER_TYPES:
            return same_batch
        if self.func is None:
            raise PipelineError(f'{self.where} has no func; give a function or "module:function"')
        return resolve_func(self.func, self.where)

    def _settle_role_and_type(self) -> None:
        contract = early_contract(self, frozenset())
        if self.node_role is None:
            reward_form = contract.form in (Form.SAMPLE_REWARD, Form.BATCH_REWARD)
            default = NodeRole.REWARD if reward_form else NodeRole.DEFAULT
            object.__setattr__(self, "node_role", self.spec.role or default)
        if self.node_type is None:
            trains = any(engine in TRAIN_ENGINES for engine in contract.engines)
            inferred = NodeType.MODEL_TRAIN if trains else NodeType.MODEL_INFERENCE
            object.__setattr__(self, "node_type", inferred if contract.engines else NodeType.COMPUTE)
        if self.retry_limit and self.node_type is NodeType.MODEL_TRAIN and not self.only_forward_compute:
            raise PipelineError(
                f"{self.where}: retry_limit={self.retry_limit}, but a node that trains has side effects and cannot "
                "run again; set only_forward_compute=True if it changes no weights"
            )
        if self.node_type in ENGINE_TYPES and not self.spec.chosen and not engines_of(self, contract):
            raise PipelineError(
                f"{self.where} is of type {self.node_type.name}, but neither its function nor its role "
                f"{self.node_role.name} names an engine; the roles with one: "
                f"{', '.join(role.name for role in ROLE_ENGINE)}"
            )


def engines_of(node: Node, contract: Contract) -> tuple[str, ...]:
    """The engines that the node uses: those its function names, else its role's if its type says that it uses one."""
    if contract.engines or node.node_type not in ENGINE_TYPES:
        return contract.engines
    return (ROLE_ENGINE[node.node_role],) if node.node_role in ROLE_ENGINE else ()


def early_contract(node: Node, fields: frozenset[str]) -> Contract:
    """The contract as far as it is known before a config is.

    What depends on the config is empty: the reads and options of a chosen function, reads or writes that are functions.
    `fields` are names known to be fields, beside the registered ones.
    """
    spec = node.spec
    known = replace(
        spec,
        reads=None if callable(spec.reads) else spec.reads,
        writes=() if callable(spec.writes) else spec.writes,
        takes=() if callable(spec.takes) else spec.takes,
    )
    wishes = Wishes(
        where=node.where,
        spec=known,
        role=node.node_role or spec.role or NodeRole.DEFAULT,
        scope=node_scope(node),
        is_field=lambda name: canonical(name) in fields or find_field(name) is not None,
        is_option=node.options.__contains__,
        late_reads=spec.chosen is not None or callable(spec.reads),
    )
    return read_contract(node.fn, wishes)


def node_scope(node: Node) -> Scope | None:
    """The scope that the graph sets, whatever the function says: markers stand for all ranks."""
    return "global" if node.node_type in MARKER_TYPES else node.scope


def _check_arguments(node: Node) -> None:
    if not isinstance(node.node_id, str) or not node.node_id.strip():
        raise PipelineError(f"node_id must be a text that is not empty, {node.node_id!r} given")
    where = node.where
    if isinstance(node.deps, str) or not all(isinstance(dep, str) for dep in _iterable(node.deps)):
        raise PipelineError(f'{where}: deps must be a list of node ids such as ["rollout_actor"], {node.deps!r} given')
    as_names(node.deps, f"{where}: deps")
    check_scope(node.scope, f"{where}: scope")
    if not isinstance(node.only_forward_compute, bool):
        raise PipelineError(f"{where}: only_forward_compute must be True or False, {node.only_forward_compute!r} given")
    for name in ("agent_group", "retry_limit"):
        value = getattr(node, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PipelineError(f"{where}: {name} must be a whole number from 0, {value!r} given")
    if not (node.config is None or isinstance(node.config, str | Mapping)):
        raise PipelineError(f"{where}: config must be a dotted key of the config or a mapping, {node.config!r} given")


def _iterable(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) else (None,)
