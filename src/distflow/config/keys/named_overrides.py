"""Keys of a group that differ for some of the names in a mapping: `{code: {adv_estimator: reinforce}}`."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distflow.config.compose.values import Mismatch, read_value, show
from distflow.config.keys.declare import KeyInfo, dotted, is_group, yaml_name
from distflow.errors import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")
Differing = dict[str, dict[str, Any]]
"""By name, the values by their dotted keys within the group."""


def parse_differing(value: object, keys: Mapping[str, KeyInfo], allowed: Collection[str], form: str) -> Differing:
    """Overrides from plain data, nested or dotted. keys: the group's, by dotted name; allowed: the keys or groups that
    may differ. form: an example. Raises Mismatch."""
    if not isinstance(value, Mapping):
        raise Mismatch("is not a mapping from domains to their settings", form)
    known = {name: info for name, info in keys.items() if name in allowed or name.partition(".")[0] in allowed}
    found: Differing = {}
    for name, settings in value.items():
        if not isinstance(name, str) or not isinstance(settings, Mapping):
            raise Mismatch(f"has {show(settings)} for {show(name)}, which is no mapping by the name of a domain", form)
        found[name] = {key: _read(name, given, known, key, form) for key, given in _flat(settings, "", known).items()}
    return found


def nested(differing: Differing) -> dict[str, dict[str, Any]]:
    """What `parse_differing` would read again, as people write it."""
    found: dict[str, dict[str, Any]] = {}
    for name, values in differing.items():
        found[name] = {}
        for key, value in values.items():
            *groups, last = key.split(".")
            place = found[name]
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = list(value) if isinstance(value, tuple) else value
    return found


def changed(group: Group, values: Mapping[str, Any], prefix: str = "") -> Group:
    """The group with these values, by their dotted names."""
    changes: dict[str, Any] = {}
    for item in fields(group):
        name, value = dotted(prefix, yaml_name(item.name)), getattr(group, item.name)
        if name in values:
            changes[item.name] = values[name]
        elif is_group(value):
            changes[item.name] = changed(value, values, name)
    return replace(group, **changes)


def _flat(settings: Mapping[str, object], prefix: str, keys: Mapping[str, KeyInfo]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in settings.items():
        key = dotted(prefix, str(name))
        if isinstance(value, Mapping) and key not in keys:
            found |= _flat(value, key, keys)
        else:
            found[key] = value
    return found


def _read(domain: str, given: object, keys: Mapping[str, KeyInfo], key: str, form: str) -> object:
    if key not in keys:
        guess = nearest(key, keys)
        meant = f"did you mean {guess}? " if guess else ""
        raise Mismatch(f"has '{key}' for the domain '{domain}'", f"{meant}there are {', '.join(keys)}; {form}")
    try:
        return read_value(given, keys[key])
    except Mismatch as error:
        raise Mismatch(f"has a {key} for the domain '{domain}' that {error.what}", error.advice) from None
