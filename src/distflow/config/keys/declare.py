"""How a key of the config is declared, `key(default, description, ...)` in a dataclass, and the
walk over all keys."""

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import ge, gt, le, lt
from typing import (
    TYPE_CHECKING,
    Any,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BY_NAME = "a parameter of that name"
"""As `taken_by`: only what names the key takes it, an option of a node, estimator, loss or engine
(`launch/taken_keys.py`)."""

T = TypeVar("T")
Group = TypeVar("Group", bound="DataclassInstance")


@dataclass(frozen=True)
class KeySpec:
    """Metadata of a key besides its type and default.

    choices: the allowed values. open_names: user modules may add to them (checked against the
    registry later). later: choices that are not implemented yet; True means any value but the
    default. minimum, maximum: inclusive bounds; above, below: exclusive ones. parse: converts plain
    data to the value; None converts by the type. plain: the inverse. advice: what to do about a
    rejected value, if the bound or the choices do not show it. taken_by: the parts of a run that
    take the key, any of which suffices (`launch/taken_keys.py`); empty if every run does. taken_if:
    whether they take it, by the other keys of its group. For a group, both hold for all its keys.
    """

    description: str = ""
    choices: tuple[str, ...] = ()
    open_names: bool = False
    later: tuple[str, ...] | bool = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    parse: Callable[[object], object] | None = None
    plain: Callable[[Any], object] = lambda value: value
    advice: str = ""
    taken_by: tuple[str, ...] | str = ()
    taken_if: Callable[[Any], object] = lambda own: True

    def allowed(self) -> str:
        """The bounds or choices as text; empty if there are none."""
        if self.later is True:
            return "only the default so far"

        if self.choices:
            absent = self.later or ()
            listed = [
                f"{choice} (not implemented yet)" if choice in absent else choice
                for choice in self.choices
            ]
            return ", ".join(listed) + (
                ", file.py:function, or a name of trainer.imports" if self.open_names else ""
            )

        return " and ".join(f"{sign} {bound:g}" for sign, _, bound in self._bounds())

    def has_room_for(self, number: float) -> bool:
        """Whether a number lies within the bounds."""
        return all(compare(number, bound) for _, compare, bound in self._bounds())

    def _bounds(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        bounds = (
            ("≥", ge, self.minimum),
            (">", gt, self.above),
            ("≤", le, self.maximum),
            ("<", lt, self.below),
        )
        return [(sign, compare, bound) for sign, compare, bound in bounds if bound is not None]


@dataclass(frozen=True)
class KeyInfo:
    """A key of the whole config: its dotted name in YAML, its type, its default."""

    name: str
    annotation: object
    default: object
    spec: KeySpec

    @property
    def arms(self) -> tuple[object, ...]:
        """The members of a union type, else the type itself."""
        is_union = get_origin(self.annotation) in (Union, types.UnionType)
        if is_union:
            return get_args(self.annotation)
        return (self.annotation,)

    @property
    def is_map(self) -> bool:
        """Whether its value is a mapping whose keys are names that the user chose."""
        return any((get_origin(arm) or arm) is dict for arm in self.arms)


def key(default: T, description: str, **spec: Any) -> T:
    """A dataclass field with a `KeySpec`. A mutable default is copied for each instance."""
    metadata = {"key": KeySpec(description, **spec)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(
    config_class: Callable[..., T], taken_by: tuple[str, ...] | str = (), **defaults: object
) -> T:
    """A dataclass field that holds a group of keys; `defaults` replace those of its class."""
    metadata = {"key": KeySpec(taken_by=taken_by)}
    return field(default_factory=lambda: config_class(**defaults), metadata=metadata)


def is_group(value: object) -> "TypeGuard[DataclassInstance]":
    """Whether a value is a group of keys, an instance of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def yaml_name(attribute: str) -> str:
    """The name in YAML: attributes that would be Python keywords end in an underscore
    (`async_`)."""
    return attribute.removesuffix("_")


def dotted(prefix: str, name: str) -> str:
    """The key `name` inside the group `prefix`, which may be empty."""
    return f"{prefix}.{name}" if prefix else name


def walk(
    instance: "DataclassInstance", prefix: str = ""
) -> Iterator[tuple[str, object, object, KeySpec]]:
    """Every key in a group as (dotted name, annotation, value, spec), in the order of
    declaration."""
    for attribute, hint, spec in _described_fields(type(instance)):
        value = getattr(instance, attribute)
        name = dotted(prefix, yaml_name(attribute))
        if is_group(value):
            yield from walk(value, name)
        else:
            yield name, hint, value, spec


@cache
def _described_fields(kind: "type[DataclassInstance]") -> list[tuple[str, object, KeySpec]]:
    """(attribute, annotation, spec) of each field. A user's dataclass may describe them by
    `metadata={"help": ...}`."""
    hints = get_type_hints(kind)
    found = []
    for item in fields(kind):
        spec = item.metadata.get("key")
        if not isinstance(spec, KeySpec):
            spec = KeySpec(str(item.metadata.get("help", "")))
        found.append((item.name, hints[item.name], spec))

    return found


def untaken(instance: "DataclassInstance", prefix: str, parts: Collection[str]) -> Iterator[str]:
    """The dotted names of keys in a group that none of these parts of a run takes."""
    for attribute, _, spec in _described_fields(type(instance)):
        value = getattr(instance, attribute)
        name = dotted(prefix, yaml_name(attribute))
        takers = (spec.taken_by,) if isinstance(spec.taken_by, str) else spec.taken_by

        is_taken = not takers or any(taker in parts for taker in takers)
        if not is_taken or not spec.taken_if(instance):
            yield from (key for key, *_ in walk(value, name)) if is_group(value) else [name]
        elif is_group(value):
            yield from untaken(value, name, parts)


def collect(instance: "DataclassInstance", prefix: str = "") -> dict[str, KeyInfo]:
    """The keys of a group that holds its defaults."""
    return {
        name: KeyInfo(name, hint, value, spec) for name, hint, value, spec in walk(instance, prefix)
    }


def plain_settings(named: Mapping[str, "DataclassInstance"]) -> dict[str, dict[str, object]]:
    """Groups of flat keys by name as plain data; defaults are omitted."""
    plain: dict[str, dict[str, object]] = {}
    for name, own in named.items():
        defaults = type(own)()
        plain[name] = {}
        for key, _, value, spec in walk(own):
            if value != getattr(defaults, key):
                plain[name][key] = spec.plain(value)

    return plain


def changed(group: Group, values: Mapping[str, Any], prefix: str = "") -> Group:
    """The group with these values, by their dotted names."""
    changes: dict[str, Any] = {}
    for item in fields(group):
        name = dotted(prefix, yaml_name(item.name))
        value = getattr(group, item.name)
        if name in values:
            changes[item.name] = values[name]
        elif is_group(value) and (within := changed(value, values, name)) is not value:
            changes[item.name] = within

    return replace(group, **changes) if changes else group
