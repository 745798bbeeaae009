"""Derives a node function's contract from its signature: fields read and written, options, engines
and scope."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import Parameter
from typing import Literal

from distflow.errors import PipelineError, hint
from distflow.graph.fields import ALIASES
from distflow.graph.node_decorator_and_roles import (
    ENGINES,
    ROLE_DEFAULTS,
    SCORE_FIELDS,
    SERVICES,
    NodeRole,
    NodeSpec,
    Scope,
)
from distflow.import_target import is_async

RESERVED = ("batch", "samples", "group", "ctx", "engine", "config", "reduce")
_SPECIAL = (*RESERVED, *ENGINES, *SERVICES)


class Form(StrEnum):
    """How a function is called.

    WIRED: fields, options, engines, services and reserved names by parameter.
    BATCH_REWARD: `(batch, config, **kwargs)`, called by keyword; options are the kwargs.
    SAMPLE_REWARD: `compute_score(data_source, solution_str, ground_truth[, extra_info])`, called
    for each sample.
    """

    WIRED = "wired"
    BATCH_REWARD = "batch_reward"
    SAMPLE_REWARD = "sample_reward"


_SAMPLE_REWARD = ("data_source", "solution_str", "ground_truth", "extra_info")


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


@dataclass(frozen=True)
class FieldsRead:
    """Fields that a function reads: required ones, and those that may be missing.

    by_keyword, by_position: the fields among them that are passed, and how; the others come in
    `batch`.
    """

    reads: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    by_keyword: tuple[str, ...] = ()
    by_position: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contract(FieldsRead):
    """What a function takes and returns. Field names are spelled as in the function; see
    `canonical`.

    writes: the fields that it returns. engines, services: the parameters that receive one.
    reserved: its parameters in `RESERVED`. options: the default of each option, or REQUIRED.
    open_options: whether it also takes options that it does not name.
    """

    form: Form
    writes: tuple[str, ...]
    scope: Scope
    engines: tuple[str, ...]
    services: tuple[str, ...]
    reserved: tuple[str, ...]
    options: Mapping[str, object]
    open_options: bool
    is_async: bool


def canonical(name: str) -> str:
    """The field's own name for an alias: `index` is `group_index`."""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class Declared:
    """Declarations about a function outside its signature.

    spec: of `@node`, overridden by `add_node`. scope: of the graph's node, which takes precedence.
    is_field: whether a field of that name is known. is_option: whether an option of that name has a
    value, which settles positional parameters that are not known fields.
    """

    where: str
    spec: NodeSpec
    role: NodeRole
    scope: Scope | None
    is_field: Callable[[str], bool]
    is_option: Callable[[str], bool]


def read_contract(fn: Callable[..., object] | None, declared: Declared) -> Contract:
    """The contract of a function; for None (a factory's node without a config), the contract of its
    role.

    Raises PipelineError if the signature does not say what the function reads.
    """
    found = None if fn is None else _parameters(fn, declared.where)
    form = form_of(found)
    fields = FieldsRead() if fn is None else _fields(form, found, declared)
    parameters = found or []
    names = {p.name for p in parameters}
    reserved = tuple(name for name in RESERVED if name in names)
    return Contract(
        **vars(fields),
        form=form,
        writes=_writes(form, declared),
        scope=_scope(fields, reserved, declared),
        engines=tuple(name for name in ENGINES if name in names),
        services=tuple(name for name in SERVICES if name in names),
        reserved=reserved,
        options=_options(form, parameters, declared),
        open_options=any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
        is_async=fn is not None and is_async(fn),
    )


def _parameters(fn: Callable[..., object], where: str) -> list[Parameter] | None:
    """None if the callable cannot be inspected (some builtins)."""
    if isinstance(fn, functools.partial) and (inner := _parameters(fn.func, where)) is not None:
        names = [p.name for p in inner]
        unknown = [name for name in fn.keywords if name not in names]
        if unknown and not any(p.kind is Parameter.VAR_KEYWORD for p in inner):
            raise PipelineError(
                f"{where}: its function takes no option '{unknown[0]}'{hint(unknown[0], names)}"
            )
    try:
        return list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):
        return None


def form_of(parameters: list[Parameter] | None) -> Form:
    """The form, recognised by the exact names of the parameters."""
    names = [p.name for p in parameters or ()]
    if names[:2] == ["batch", "config"] and [p.kind for p in parameters or ()][2:] == [
        Parameter.VAR_KEYWORD
    ]:
        return Form.BATCH_REWARD
    return Form.SAMPLE_REWARD if tuple(names[:3]) == _SAMPLE_REWARD[:3] else Form.WIRED


def _fields(form: Form, parameters: list[Parameter] | None, declared: Declared) -> FieldsRead:
    if form is Form.BATCH_REWARD:
        return FieldsRead(*_explicit(declared))
    if form is Form.SAMPLE_REWARD:
        optional = ("extra_info",) if any(p.name == "extra_info" for p in parameters or ()) else ()
        required = ("data_source", "responses", "ground_truth")
        return FieldsRead(required, optional, by_keyword=(*required, *optional))
    explicit = declared.spec.reads is not None
    return (
        _explicit_fields(parameters, declared)
        if explicit
        else _signature_fields(parameters, declared)
    )


def _role_of(
    parameter: Parameter, declared: Declared
) -> Literal["field", "optional", "option", "special", "rest"]:
    """The meaning of a parameter that `reads` does not name."""
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        return "rest"
    if parameter.name in _SPECIAL:
        return "special"
    if parameter.kind is Parameter.KEYWORD_ONLY:
        return "option"
    is_field = declared.is_field(parameter.name)
    if not is_field and declared.is_option(parameter.name):
        return "option"
    if parameter.default is Parameter.empty:
        return "field"
    return "optional" if is_field or parameter.default is None else "option"


def _signature_fields(parameters: list[Parameter] | None, declared: Declared) -> FieldsRead:
    if parameters is None:
        raise PipelineError(
            f"{declared.where}: its function cannot be inspected; declare what it reads with "
            "@node(reads=...)"
        )
    # estimators receive only their named parameters
    named_only = declared.role is NodeRole.ADVANTAGE
    for p in parameters:
        if p.kind is Parameter.VAR_POSITIONAL or (
            p.kind is Parameter.VAR_KEYWORD and not named_only
        ):
            raise PipelineError(
                f"{declared.where}: '{p}' does not say what it reads; declare it with "
                "@node(reads=...)"
            )
    roles = {p.name: _role_of(p, declared) for p in parameters}
    passed = [p for p in parameters if roles[p.name] in ("field", "optional")]
    for p in parameters:
        # calls pass only fields by position
        if p.kind is Parameter.POSITIONAL_ONLY and p not in passed:
            raise PipelineError(
                f"{declared.where}: '{p.name}' is positional-only, which is allowed only for fields"
            )
    return FieldsRead(
        reads=tuple(p.name for p in passed if roles[p.name] == "field"),
        optional=tuple(p.name for p in passed if roles[p.name] == "optional"),
        by_keyword=tuple(p.name for p in passed if p.kind is not Parameter.POSITIONAL_ONLY),
        by_position=tuple(p.name for p in passed if p.kind is Parameter.POSITIONAL_ONLY),
    )


def _explicit(declared: Declared) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(required, optional) of `@node(reads=...)`."""
    names = declared.spec.reads or ()
    return tuple(n for n in names if n[0] != "?"), tuple(n[1:] for n in names if n[0] == "?")


def _explicit_fields(parameters: list[Parameter] | None, declared: Declared) -> FieldsRead:
    required, optional = _explicit(declared)
    named = tuple(n.removeprefix("?") for n in declared.spec.reads or ())
    if parameters is None:
        return FieldsRead(required, optional, by_position=named)
    leading = [
        p
        for p in parameters
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    ordinary = [p for p in leading if p.name not in _SPECIAL]
    for p in ordinary:
        if p.name not in named and _role_of(p, declared) == "field":
            raise PipelineError(
                f"{declared.where}: @node(reads=...) leaves out its parameter "
                f"'{p.name}'{hint(p.name, named)}"
            )
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        first = tuple(p.name for p in leading)
        if first != named[: len(first)]:
            raise PipelineError(
                f"{declared.where}: before its *args it takes {', '.join(first)}; @node(reads=...) "
                "must begin so"
            )
        return FieldsRead(required, optional, by_position=named)
    names = {p.name for p in ordinary} | {
        p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY
    }
    unnamed = [n for n in named if n not in names]
    open_kwargs = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    if (
        unnamed
        and not open_kwargs
        and not any(p.name in ("batch", "samples", "group") for p in parameters)
    ):
        raise PipelineError(
            f"{declared.where}: it reads '{unnamed[0]}' but has no parameter for "
            f"it{hint(unnamed[0], names)}; "
            "name one, or take `batch` or `samples`"
        )
    by_position = tuple(
        p.name for p in ordinary if p.kind is Parameter.POSITIONAL_ONLY and p.name in named
    )
    by_keyword = tuple(n for n in named if n not in by_position and (n in names or open_kwargs))
    return FieldsRead(required, optional, by_keyword, by_position)


def _writes(form: Form, declared: Declared) -> tuple[str, ...]:
    if declared.spec.writes is not None:
        return declared.spec.writes
    if form is Form.SAMPLE_REWARD:
        return ("scores",)
    return SCORE_FIELDS if form is Form.BATCH_REWARD else ROLE_DEFAULTS[declared.role].writes


def _scope(fields: FieldsRead, reserved: tuple[str, ...], declared: Declared) -> Scope:
    if "reduce" in reserved:
        return "global"
    if scope := declared.scope or declared.spec.scope:
        return scope
    reads_groups = any(
        canonical(name) == "group_index" for name in (*fields.reads, *fields.optional)
    )
    return "group" if reads_groups else ROLE_DEFAULTS[declared.role].scope or "sample"


def _options(form: Form, parameters: list[Parameter], declared: Declared) -> dict[str, object]:
    if form is Form.BATCH_REWARD:
        return {}
    if form is Form.SAMPLE_REWARD:
        found = [
            p
            for p in parameters
            if p.name not in _SAMPLE_REWARD and p.kind is not Parameter.VAR_KEYWORD
        ]
    else:
        fields = {name for names in _explicit(declared) for name in names}
        found = [
            p for p in parameters if p.name not in fields and _role_of(p, declared) == "option"
        ]
    return {p.name: REQUIRED if p.default is Parameter.empty else p.default for p in found}
