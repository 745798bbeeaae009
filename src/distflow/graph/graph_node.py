"""The node of a graph, and what a node function may return."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from distflow.errors import PipelineError, hint
from distflow.graph.contract_from_signature import (
    Contract,
    Declared,
    Form,
    read_contract,
)
from distflow.graph.fields import canonical, find_field
from distflow.graph.node_roles import (
    CONFIGURING_TYPES,
    ENGINE_TYPES,
    MARKER_TYPES,
    ROLE_DEFAULTS,
    NodeRole,
    NodeType,
    Plane,
    RoleDefaults,
    Scope,
)
from distflow.graph.node_spec import NodeSpec, as_member, as_names, check_scope, is_factory, spec_of
from distflow.import_target import LoadError, load_function


@dataclass(frozen=True)
class NodeOutput:
    """A return value of node functions."""

    batch: object
    """The batch, or a mapping of columns."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of this call."""
    weight: float | None = None
    """The number of values that the metrics average; by default the node's samples."""


@dataclass(frozen=True)
class Drop:
    """A return value of nodes in the rollout loop: the group leaves the run, and a new one may
    start."""

    reason: str
    """A short name for the counts (`async/dropped/REASON`)."""
    detail: str = ""
    """What happened to this group, in words."""


_IGNORED: dict[str, object] = {"agent_group": 0, "filter_plugin": None}
"""Arguments of other systems' `add_node` that do not exist here: their defaults are accepted."""

_T = TypeVar("_T")


def same_batch(batch: _T) -> _T:
    """The function of a node that marks a reshard. The plan decides whether one occurs; rows do not
    change."""
    return batch


def all_arrived(*, reduce: Any) -> None:
    """The function of a barrier: returns once all ranks that run the node have reached it. reduce:
    over them."""
    reduce.sum(0.0)


def rows_are_there() -> None:
    """The function of a node that names the data set. A group has its row before its first node
    runs."""


_WITHOUT_FUNC: dict[NodeType, str | Callable[..., object]] = {
    NodeType.BARRIER_SYNC: all_arrived,
    NodeType.PUT_TO_BUFFER: same_batch,
    NodeType.GET_FROM_BUFFER: same_batch,
    NodeType.DATA_LOAD: rows_are_there,
    NodeType.ENV_INTERACT: "distflow.pipelines.nodes:run_workflow",
}
"""The functions of nodes that need none."""


@dataclass(frozen=True)
class Node:
    """One function of a graph, with the arguments of `add_node`. Those that are None have defaults
    by role (`ROLE_DEFAULTS`). Raises PipelineError if an argument has a wrong type or the function
    is not found."""

    node_id: str
    """Its name."""
    func: str | Callable[..., object] | None = None
    """The function or its name; None for types that need none."""
    deps: tuple[str, ...] = ()
    """Nodes that must run first, besides those that write what it reads."""
    node_type: NodeType = None  # type: ignore[assignment]  # set in __post_init__, like node_role
    """Inferred from the function's engines by default."""
    node_role: NodeRole = None  # type: ignore[assignment]  # likewise
    """That of `@node` by default, else DEFAULT."""
    only_forward_compute: bool = False
    """It uses a train engine without changing weights."""
    config: str | Mapping[str, object] | None = None
    """The part of the config that it receives: a dotted key, or a mapping."""
    engine: str | None = None
    """The engine to use if its type needs one and no parameter names it."""
    writes: tuple[str, ...] | None = None
    """The fields that it writes; takes precedence over `@node`, as `scope` does."""
    scope: Scope | None = None
    """Which samples it must see together."""
    plane: Plane | None = None
    """Where it must run."""
    phase: str | None = None
    """The name of its time metric."""
    validates: bool | None = None
    """Whether validation runs it too."""
    retry_limit: int = 0
    """Number of retries after a failure."""
    policy: str | None = None
    """The policy whose path it belongs to; None belongs to every path."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Values for the function's options; keys of the config if the node `configures` it."""
    fn: Callable[..., object] = field(init=False, repr=False, compare=False)
    spec: NodeSpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = self.where
        _check_arguments(self)
        settle = object.__setattr__
        settle(self, "deps", tuple(self.deps))

        options = dict(self.options)
        for name, default in _IGNORED.items():
            if options.get(name, self) == default:
                del options[name]

        settle(self, "options", options)
        if self.writes is not None:
            settle(self, "writes", as_names(self.writes, f"{where}: writes"))

        for name, kind in (("node_type", NodeType), ("node_role", NodeRole)):
            if getattr(self, name) is not None:
                settle(self, name, as_member(kind, getattr(self, name), f"{where}: {name}"))

        func = _WITHOUT_FUNC.get(self.node_type) if self.func is None else self.func

        if func is None:
            raise PipelineError(f'{where} has no func; pass a function or "module:function"')

        settle(self, "fn", resolve_func(func, where))
        spec = spec_of(self.fn)
        settle(self, "spec", spec if self.writes is None else replace(spec, writes=self.writes))
        self._settle_role_and_type()

    @property
    def where(self) -> str:
        return f"node {self.node_id!r}"

    @property
    def configures(self) -> bool:
        """Whether its options are keys of the config, and not options of its function."""
        return self.func is None and self.node_type in CONFIGURING_TYPES

    @property
    def own_options(self) -> Mapping[str, object]:
        """The options of its function."""
        return {} if self.configures else self.options

    @property
    def by_role(self) -> RoleDefaults:
        return ROLE_DEFAULTS[self.node_role]

    def _settle_role_and_type(self) -> None:
        contract = contract_of(self)
        if self.node_role is None:
            default = NodeRole.REWARD
            if contract.form is Form.WIRED:
                default = NodeRole.DEFAULT
            object.__setattr__(self, "node_role", self.spec.role or default)

        if is_factory(self.fn):
            return  # the function depends on the config

        engines = engines_of(self, contract)
        if self.node_type is None:
            inferred = NodeType.COMPUTE
            if engines:
                inferred = NodeType.MODEL_INFERENCE
            if {*engines} - {"rollout"}:
                inferred = NodeType.MODEL_TRAIN
            object.__setattr__(self, "node_type", inferred)

        trains = self.node_type is NodeType.MODEL_TRAIN and not self.only_forward_compute
        if self.retry_limit and trains:
            raise PipelineError(
                f"{self.where}: retry_limit={self.retry_limit}, but a node that trains has side "
                "effects and cannot run again; set only_forward_compute=True if it changes no "
                "weights"
            )

        takes_own = "engine" in contract.reserved
        if (self.node_type in ENGINE_TYPES or takes_own) and not engines:
            with_one = [role.name for role, defaults in ROLE_DEFAULTS.items() if defaults.engine]
            raise PipelineError(
                f"{self.where} uses an engine, but neither its function nor its role "
                f"{self.node_role.name} names one; the roles with one: {', '.join(with_one)}"
            )


def resolve_factory(node: Node, config: object) -> Node:
    """The node itself, or with the function that its factory returns for the config.

    Raises PipelineError if the factory raises or does not return a function.
    """
    if not is_factory(node.fn):
        return node

    try:
        fn = node.fn(config)
    except (ValueError, LookupError, AttributeError) as error:
        raise PipelineError(f"{node.where}: {error}") from error

    if not callable(fn) or is_factory(fn):
        raise PipelineError(f"{node.where}: its factory returned {fn!r}, which is not a function")

    role: NodeRole | None = (
        None if node.spec.role is None and node.node_role is NodeRole.DEFAULT else node.node_role
    )

    # resolved again
    result = replace(node, func=fn, node_role=role, options=node.own_options)  # type: ignore[arg-type]
    declared = {name: value for name, value in vars(result.spec).items() if value is not None}
    object.__setattr__(result, "spec", replace(node.spec, **declared))

    return result


def engines_of(node: Node, contract: Contract) -> tuple[str, ...]:
    """The engines that the node uses: those that its function names; else, if its type uses one or
    its function has a parameter `engine`, its own engine or its role's."""
    own = node.engine or node.by_role.engine
    if "engine" in contract.reserved:
        if own:
            return tuple(dict.fromkeys((own, *contract.engines)))
        return ()

    uses_own = own is not None and not contract.engines and node.node_type in ENGINE_TYPES
    return (own,) if uses_own and own else contract.engines


def contract_of(node: Node, fields: Collection[str] = (), config: Collection[str] = ()) -> Contract:
    """The contract of a node. For a factory's node, only the defaults of its role are known.

    fields: names of fields, besides the registered ones. config: names in the config group of the
    node.
    """
    known = {*node.own_options, *config}
    if isinstance(node.config, Mapping):
        known.update(node.config)
    declared = Declared(
        where=node.where,
        spec=node.spec,
        role=node.node_role or node.spec.role or NodeRole.DEFAULT,
        scope="global" if node.node_type in MARKER_TYPES else node.scope,
        is_field=lambda name: canonical(name) in fields or find_field(name) is not None,
        is_option=known.__contains__,
    )

    return read_contract(None if is_factory(node.fn) else node.fn, declared)


def contracts_of(
    nodes: Mapping[str, Node],
    fields: Collection[str] = (),
    configs: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Contract]:
    """The contract of each node, read twice: the fields that a node may read depend on what the
    others write."""

    def read(known: Collection[str]) -> dict[str, Contract]:
        return {
            key: contract_of(node, known, (configs or {}).get(key, ()))
            for key, node in nodes.items()
        }

    written = set()
    for contract in read(fields).values():
        for name in contract.writes:
            written.add(canonical(name))

    return read({*fields, *written})


NODE_SETTINGS = tuple(item.name for item in fields(Node) if item.init and item.name != "options")
"""The arguments of `add_node` that are not options of the function."""


def split_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a node, with those that are none of its settings under `options`."""
    settings: dict[str, Any] = {"options": {}}
    for name, value in arguments.items():
        target = settings if name in NODE_SETTINGS else settings["options"]
        target[name] = value

    return settings


def _check_arguments(node: Node) -> None:
    if not isinstance(node.node_id, str) or not node.node_id.strip():
        raise PipelineError(f"node_id must be a str that is not empty, not {node.node_id!r}")

    where = node.where
    is_sequence = isinstance(node.deps, Iterable) and not isinstance(node.deps, str)
    if not is_sequence or not all(isinstance(dep, str) for dep in node.deps):
        raise PipelineError(
            f'{where}: deps must be a list of node ids such as ["rollout_actor"], not {node.deps!r}'
        )

    as_names(node.deps, f"{where}: deps")
    check_scope(node.scope, f"{where}: scope")

    if (
        not isinstance(node.retry_limit, int)
        or isinstance(node.retry_limit, bool)
        or node.retry_limit < 0
    ):
        raise PipelineError(f"{where}: retry_limit must be an int from 0, not {node.retry_limit!r}")

    planes = ("rollout", "training")
    if node.plane is not None and node.plane not in planes:
        raise PipelineError(f"{where}: plane {node.plane!r} is none{hint(str(node.plane), planes)}")


def resolve_func(func: object, where: str) -> Callable[..., object]:
    """The callable of a node's `func`; `load_function` resolves a str.

    Raises PipelineError, beginning with `where`, if it cannot be called.
    """
    if isinstance(func, str):
        try:
            return load_function(func)
        except LoadError as err:
            raise PipelineError(f"{where}: {err}") from err

    if isinstance(func, type):
        raise PipelineError(
            f"{where}: func {func!r} is a class; name one of its methods or pass an instance"
        )
    if not callable(func):
        raise PipelineError(
            f'{where}: func {func!r} cannot be called; pass a function or "module:function"'
        )

    return func
