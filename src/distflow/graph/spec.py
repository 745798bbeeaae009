"""The `@node` decorator: what a node function says of itself beyond its signature."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from distflow.config.errors import hint
from distflow.graph.errors import PipelineError
from distflow.graph.roles import SCOPES, NodeRole, Scope

Names = str | Sequence[str]


@dataclass(frozen=True)
class NodeSpec:
    """What `@node` says of a function beyond its signature. See `node`."""

    writes: Names | Callable[[Any], Names] | None = None
    role: NodeRole | None = None
    scope: Scope | None = None
    reads: Names | Callable[[Any], Names] | None = None
    takes: Names | Callable[[Any], Iterable[str]] = ()
    when: str | Callable[[Any], bool] | None = None
    chosen: Callable[[Any], Callable[..., Any] | str] | None = None


_ATTRIBUTE = "__distflow_node__"
_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def node(
    *,
    writes: Names | Callable[[Any], Names] | None = None,
    role: NodeRole | str | None = None,
    scope: Scope | None = None,
    reads: Names | Callable[[Any], Names] | None = None,
    takes: Names | Callable[[Any], Iterable[str]] = (),
    when: str | Callable[[Any], bool] | None = None,
    chosen: Callable[[Any], Callable[..., Any] | str] | None = None,
) -> Callable[[_Fn], _Fn]:
    """Say of a node function what its signature cannot. Functions of a config receive the whole config at `bind`.

    writes: the fields it writes, or a function of the config. Rewards and advantages have a default.
    role: the role of nodes made of it, where `add_node` names none.
    scope: which samples it must see together: one, a whole group, or all of all ranks.
    reads: the fields it reads, where the parameters do not tell; "?name" is optional. Or a function of the config.
    takes: config keys ("algorithm.gamma") it uses beyond its options. Or a function of the config.
    when: a config key or a function of the config; where it is false the node is left out and its dependents
        inherit its deps. A key given here counts as taken.
    chosen: a function of the config that gives the function to run in place of this one.
    Raises PipelineError for an unknown role or scope.
    """
    spec = NodeSpec(
        writes=writes,
        role=None if role is None else as_member(NodeRole, role, "@node: role"),
        scope=check_scope(scope, "@node"),
        reads=reads,
        takes=takes,
        when=when,
        chosen=chosen,
    )

    def mark(fn: _Fn) -> _Fn:
        try:
            setattr(fn, _ATTRIBUTE, spec)
        except (AttributeError, TypeError):  # builtins and bound methods take no attributes
            fn = functools.partial(fn)  # type: ignore[assignment]
            setattr(fn, _ATTRIBUTE, spec)
        return fn

    return mark


def spec_of(fn: Callable[..., Any]) -> NodeSpec:
    """What `@node` said of the function, looked up through `functools.partial` and `__call__`."""
    spec = getattr(fn, _ATTRIBUTE, None)
    if spec is None and isinstance(fn, functools.partial):
        return spec_of(fn.func)
    if spec is None and not isinstance(fn, type):
        spec = getattr(type(fn).__call__, _ATTRIBUTE, None)
    return spec if spec is not None else NodeSpec()


_Member = TypeVar("_Member", bound=Enum)


def as_member(kind: type[_Member], value: Any, where: str) -> _Member:
    """The member of that name. Raises PipelineError with the nearest name."""
    if isinstance(value, kind):
        return value
    name = value.removeprefix(f"{kind.__name__}.").upper() if isinstance(value, str) else ""
    if name in kind.__members__:
        return kind[name]
    raise PipelineError(f"{where}: {value!r} is no {kind.__name__}{hint(str(value), kind.__members__)}")


def check_scope(scope: Any, where: str) -> Scope | None:
    """The scope itself. Raises PipelineError if there is no such scope."""
    if scope is not None and scope not in SCOPES:
        raise PipelineError(f"{where}: {scope!r} is no scope{hint(str(scope), SCOPES)}")
    return scope


def as_names(value: Any, where: str) -> tuple[str, ...]:
    """A name or a sequence of names as a tuple. Raises PipelineError for anything else and for a name given twice."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PipelineError(f"{where}: names wanted, {name!r} given")
        if names.count(name) > 1:
            raise PipelineError(f"{where}: '{name}' is named twice")
    return names
