"""What a node's function declares, and the decorator `@node` that declares it."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from distflow.errors import PipelineError, hint
from distflow.graph.fields import Axis, register_field
from distflow.graph.node_roles import SCOPES, NodeRole, Scope

Names = str | Sequence[str]


@dataclass(frozen=True)
class NodeSpec:
    """What `@node` declares beyond the signature. See `node`."""

    writes: tuple[str, ...] | None = None
    role: NodeRole | None = None
    scope: Scope | None = None
    reads: tuple[str, ...] | None = None


_ATTRIBUTE = "__distflow_node__"
_FACTORY = "__distflow_node_factory__"
_Fn = TypeVar("_Fn", bound=Callable[..., object])


def node(
    *,
    writes: Names | Mapping[str, str] | None = None,
    role: NodeRole | str | None = None,
    scope: Scope | None = None,
    reads: Names | None = None,
) -> Callable[[_Fn], _Fn]:
    """Declare what a node function's signature cannot say.

    writes: the fields it writes; a role may have a default. A mapping declares custom columns by
    their axes, e.g.
        {"bonus": "sample"}: float64 with one number per sample, else float32; see `register_field`
        for other types.
    role: the role of its nodes, if `add_node` names none. scope: which samples it must see
    together: one, a whole group, or all samples of all ranks. reads: the fields it reads, if the
    parameters do not say; "?name" is optional. Raises PipelineError for an unknown role or scope,
    ValueError for a column that already means something else.
    """
    if isinstance(writes, Mapping):
        for name, axis in writes.items():
            known = [member.value for member in Axis]
            if axis not in known:
                meant = hint(axis, known)
                if axis == "token":
                    meant = ": one number per token of a response is 'response'"
                raise PipelineError(
                    f"@node: writes: '{axis}' of column '{name}' is not an axis{meant}"
                )

            register_field(name, _DTYPES.get(axis, "float32"), axis)

    spec = NodeSpec(
        writes=None if writes is None else as_names(writes, "@node: writes"),
        role=None if role is None else as_member(NodeRole, role, "@node: role"),
        scope=check_scope(scope, "@node"),
        reads=None if reads is None else as_names(reads, "@node: reads"),
    )
    return lambda fn: _marked(fn, _ATTRIBUTE, spec)


_DTYPES = {Axis.OBJECT.value: "object", Axis.SAMPLE.value: "float64"}


def node_factory(fn: _Fn) -> _Fn:
    """Mark a function that returns the node function for a config: for nodes whose columns depend
    on the config.

    `TaskGraph.bind` calls it. `@node(role=...)` on it sets the role of its nodes.
    """
    return _marked(fn, _FACTORY, True)


def is_factory(fn: Callable[..., object]) -> bool:
    """Whether it was marked by `node_factory`."""
    if isinstance(fn, functools.partial):
        return is_factory(fn.func)
    return bool(getattr(fn, _FACTORY, False))


def spec_of(fn: Callable[..., object]) -> NodeSpec:
    """The `@node` declaration of the function, looked up through `functools.partial` and
    `__call__`."""
    spec = getattr(fn, _ATTRIBUTE, None)
    if spec is None and isinstance(fn, functools.partial):
        return spec_of(fn.func)
    if spec is None and not isinstance(fn, type):
        spec = getattr(type(fn).__call__, _ATTRIBUTE, None)
    return spec if spec is not None else NodeSpec()


def _marked(fn: _Fn, attribute: str, value: object) -> _Fn:
    try:
        setattr(fn, attribute, value)
    except (AttributeError, TypeError):  # builtins and bound methods accept no attributes
        # another type, called in the same way
        fn = functools.partial(fn)  # type: ignore[assignment]
        setattr(fn, attribute, value)

    return fn


_Member = TypeVar("_Member", bound=Enum)


def as_member(kind: type[_Member], value: object, where: str) -> _Member:
    """The member of that name. Raises PipelineError with the nearest name."""
    if isinstance(value, kind):
        return value

    name = ""
    if isinstance(value, str):
        name = value.removeprefix(f"{kind.__name__}.").upper()

    if name in kind.__members__:
        return kind[name]

    raise PipelineError(
        f"{where}: {value!r} is not a {kind.__name__}{hint(str(value), kind.__members__)}"
    )


def check_scope(scope: str | None, where: str) -> Scope | None:
    """The scope itself. Raises PipelineError if there is no such scope."""
    if scope is not None and scope not in SCOPES:
        raise PipelineError(f"{where}: {scope!r} is not a scope{hint(str(scope), SCOPES)}")
    return scope


def as_names(value: object, where: str) -> tuple[str, ...]:
    """A name or a sequence of names as a tuple. Raises PipelineError for anything else and for a
    repeated name."""
    is_one = isinstance(value, str) or not isinstance(value, Iterable)
    names: tuple[Any, ...] = (value,) if is_one else tuple(value)  # type: ignore[arg-type]
    for name in names:
        if not isinstance(name, str) or not name:
            raise PipelineError(f"{where}: expected names, got {name!r}")
        if names.count(name) > 1:
            raise PipelineError(f"{where}: '{name}' is named twice")

    return names
