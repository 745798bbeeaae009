"""Derives a node function's contract from its signature: fields read and written, options, engines
and scope."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import Parameter
from typing import Literal

from distflow.errors import PipelineError, hint
from distflow.graph.fields import canonical
from distflow.graph.node_roles import (
    ENGINES,
    ROLE_DEFAULTS,
    SCORE_FIELDS,
    SERVICES,
    NodeRole,
    Scope,
)
from distflow.graph.node_spec import NodeSpec
from distflow.import_target import is_async

RESERVED = ("batch", "samples", "group", "ctx", "engine", "config", "reduce")
_SPECIAL = (*RESERVED, *ENGINES, *SERVICES)


class Form(StrEnum):
    """How a function is called."""

    WIRED = "wired"
    """Fields, options, engines, services and reserved names by parameter."""
    BATCH_REWARD = "batch_reward"
    """`(batch, config, **kwargs)`, called by keyword; options are the kwargs."""
    SAMPLE_REWARD = "sample_reward"
    """`compute_score(data_source, solution_str, ground_truth[, extra_info])`, called for each
    sample."""


_SAMPLE_REWARD = ("data_source", "solution_str", "ground_truth", "extra_info")


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


@dataclass(frozen=True)
class FieldsRead:
    """Fields that a function reads. Those that are not passed by keyword come in `batch`."""

    reads: tuple[str, ...] = ()
    """Required fields."""
    optional: tuple[str, ...] = ()
    """Fields that may be missing."""
    by_keyword: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contract(FieldsRead):
    """What a function takes and returns. Field names are spelled as in the function; see
    `canonical`."""

    form: Form
    writes: tuple[str, ...]
    """The fields that it returns."""
    scope: Scope
    engines: tuple[str, ...]
    """The parameters that receive an engine."""
    services: tuple[str, ...]
    """The parameters that receive a service."""
    reserved: tuple[str, ...]
    """Its parameters in `RESERVED`."""
    options: Mapping[str, object]
    """The default of each option, or REQUIRED."""
    open_options: bool
    """Whether it also takes options that it does not name."""
    is_async: bool


@dataclass(frozen=True)
class Declared:
    """Declarations about a function outside its signature."""

    where: str
    """The node, for messages."""
    spec: NodeSpec
    """Of `@node`, overridden by `add_node`."""
    role: NodeRole
    scope: Scope | None
    """Of the graph's node, which takes precedence."""
    is_field: Callable[[str], bool]
    """Whether a field of that name is known."""
    is_option: Callable[[str], bool]
    """Whether an option of that name has a value, which settles positional parameters that are not
    known fields."""


def read_contract(fn: Callable[..., object] | None, declared: Declared) -> Contract:
    """The contract of a function; for None (a factory's node without a config), the contract of its
    role.

    Raises PipelineError if the signature does not say what the function reads.
    """
    fields = FieldsRead()
    parameters = list[Parameter]()
    form = Form.WIRED
    if fn is not None:
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (ValueError, TypeError) as error:
            raise PipelineError(
                f"{declared.where}: its function cannot be inspected ({error}); write one around it"
            ) from error

        form = form_of(parameters)
        fields = _fields(form, parameters, declared)

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


def form_of(parameters: list[Parameter]) -> Form:
    """The form, recognised by the exact names of the parameters."""
    names = tuple(p.name for p in parameters)
    rest = [p.kind for p in parameters[2:]]
    if names[:2] == ("batch", "config") and rest == [Parameter.VAR_KEYWORD]:
        return Form.BATCH_REWARD
    if names[:3] == _SAMPLE_REWARD[:3]:
        return Form.SAMPLE_REWARD
    return Form.WIRED


def _fields(form: Form, parameters: list[Parameter], declared: Declared) -> FieldsRead:
    if form is Form.BATCH_REWARD:
        return FieldsRead(*_explicit(declared))

    if form is Form.SAMPLE_REWARD:
        required = ("data_source", "responses", "ground_truth")
        optional: tuple[str, ...] = ()
        if any(p.name == "extra_info" for p in parameters):
            optional = ("extra_info",)
        return FieldsRead(required, optional, (*required, *optional))

    for p in parameters:
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            raise PipelineError(
                f"{declared.where}: '{p}' cannot be passed by a name, as fields and options are"
            )

    if declared.spec.reads is not None:
        return _explicit_fields(parameters, declared)
    return _signature_fields(parameters, declared)


def _role_of(
    parameter: Parameter, declared: Declared
) -> Literal["field", "optional", "option", "special", "rest"]:
    """The meaning of a parameter that `reads` does not name."""
    if parameter.kind is Parameter.VAR_KEYWORD:
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
    if is_field or parameter.default is None:
        return "optional"

    return "option"


def _signature_fields(parameters: list[Parameter], declared: Declared) -> FieldsRead:
    required = list[str]()
    optional = list[str]()
    by_keyword = list[str]()
    for p in parameters:
        # estimators receive only their named parameters
        if p.kind is Parameter.VAR_KEYWORD and declared.role is not NodeRole.ADVANTAGE:
            raise PipelineError(
                f"{declared.where}: '{p}' does not say what it reads; declare it with "
                "@node(reads=...)"
            )

        role = _role_of(p, declared)
        if role == "field":
            required.append(p.name)
        elif role == "optional":
            optional.append(p.name)
        else:
            continue

        by_keyword.append(p.name)

    return FieldsRead(tuple(required), tuple(optional), tuple(by_keyword))


def _explicit(declared: Declared) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(required, optional) of `@node(reads=...)`."""
    names = declared.spec.reads or ()
    required = tuple(name for name in names if name[0] != "?")
    optional = tuple(name[1:] for name in names if name[0] == "?")
    return required, optional


def _explicit_fields(parameters: list[Parameter], declared: Declared) -> FieldsRead:
    required, optional = _explicit(declared)
    named = tuple(name.removeprefix("?") for name in declared.spec.reads or ())

    for p in parameters:
        if p.name not in named and _role_of(p, declared) == "field":
            raise PipelineError(
                f"{declared.where}: @node(reads=...) leaves out its parameter "
                f"'{p.name}'{hint(p.name, named)}"
            )

    names = {p.name for p in parameters}
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return FieldsRead(required, optional, named)

    by_keyword = tuple(name for name in named if name in names)
    if by_keyword != named and names.isdisjoint(("batch", "samples", "group")):
        missing = next(name for name in named if name not in names)
        raise PipelineError(
            f"{declared.where}: it reads '{missing}' but has no parameter for "
            f"it{hint(missing, names)}; name one, or take `batch` or `samples`"
        )

    return FieldsRead(required, optional, by_keyword)


def _writes(form: Form, declared: Declared) -> tuple[str, ...]:
    if declared.spec.writes is not None:
        return declared.spec.writes
    if form is Form.SAMPLE_REWARD:
        return ("scores",)
    if form is Form.BATCH_REWARD:
        return SCORE_FIELDS
    return ROLE_DEFAULTS[declared.role].writes


def _scope(fields: FieldsRead, reserved: tuple[str, ...], declared: Declared) -> Scope:
    if "reduce" in reserved:
        return "global"

    scope = declared.scope or declared.spec.scope
    if scope:
        return scope

    for name in (*fields.reads, *fields.optional):
        if canonical(name) == "group_index":
            return "group"

    return ROLE_DEFAULTS[declared.role].scope or "sample"


def _options(form: Form, parameters: list[Parameter], declared: Declared) -> dict[str, object]:
    options: dict[str, object] = {}
    if form is Form.BATCH_REWARD:
        return options

    required, optional = _explicit(declared)
    for p in parameters:
        if form is Form.SAMPLE_REWARD:
            is_option = p.name not in _SAMPLE_REWARD and p.kind is not Parameter.VAR_KEYWORD
        elif p.name in required or p.name in optional:
            is_option = False
        else:
            is_option = _role_of(p, declared) == "option"

        if is_option:
            options[p.name] = REQUIRED if p.default is Parameter.empty else p.default

    return options
