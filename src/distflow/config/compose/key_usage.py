"""A config that records which of its keys are read, to report those that were set and never read."""

from collections.abc import Hashable
from dataclasses import fields, replace
from functools import cache
from typing import TypeVar, cast

from distflow.config.keys.declare import dotted, is_group, walk, yaml_name
from distflow.config.keys.schema import Config

T = TypeVar("T")


class _Watching:
    """A base class beside that of a group: reading a key adds its dotted name to `_reads`."""

    def __getattribute__(self, name: str) -> object:
        value = object.__getattribute__(self, name)
        own = object.__getattribute__(self, "__dict__")
        if name in own and "_reads" in own and not name.startswith("_") and not is_group(value):
            own["_reads"].add(dotted(own["_key"], yaml_name(name)))
        return value


def watch(config: Config) -> tuple[Config, set[str]]:
    """A watched config, and the set to which it adds the dotted name of each key that is read."""
    reads: set[str] = set()
    return _watched(config, "", reads), reads


def peek(config: T) -> T:
    """The plain config or group of a watched one; reading its keys is not recorded."""
    return cast(T, config.__dict__["_plain"]) if isinstance(config, _Watching) else config


def with_group(config: Config, name: str, group: object) -> Config:
    """The config with another top-level group; a watched config stays watched."""
    made = replace(peek(config), **{name: group})  # type: ignore[arg-type]  # a group of the kind that is there
    return _watched(made, "", config.__dict__["_reads"]) if isinstance(config, _Watching) else made


def whole(group: T) -> T:
    """The plain group of a watched one, for code that takes the whole group: all its keys count as read."""
    own = peek(group)
    if isinstance(group, _Watching) and is_group(own):
        group.__dict__["_reads"].update(key for key, *_ in walk(own, group.__dict__["_key"]))
    return own


def plain(group: object) -> dict[str, object]:
    """The keys of a group without those of nested groups, as a mapping; all count as read."""
    value = whole(group)
    assert is_group(value)
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _watched(group: T, key: str, reads: set[str]) -> T:
    copy: object = object.__new__(_watching_class(cast(Hashable, type(group))))
    for name, value in vars(group).items():
        below = dotted(key, yaml_name(name))
        if name == "user_groups":
            value = {own: _watched(made, own, reads) for own, made in value.items()}
        copy.__dict__[name] = _watched(value, below, reads) if is_group(value) else value
    copy.__dict__.update(_plain=group, _key=key, _reads=reads)
    return cast(T, copy)


@cache
def _watching_class(group_class: Hashable) -> type:
    """A subclass of the group's class, so that `isinstance` holds in user functions."""
    assert isinstance(group_class, type)
    return type(group_class.__name__, (_Watching, group_class), {})
