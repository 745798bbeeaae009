"""A config that notes which of its keys are read, so that one that was set and never read can be named."""

from collections.abc import Hashable
from dataclasses import fields, replace
from functools import cache
from typing import TypeVar, cast

from distflow.config.keys.declare import dotted, is_group, walk, yaml_name
from distflow.config.keys.schema import Config

T = TypeVar("T")


class _Watching:
    """Beside the class of a group: reading a key adds its dotted name to `_reads`. All else is as in the group."""

    def __getattribute__(self, name: str) -> object:
        value = object.__getattribute__(self, name)
        own = object.__getattribute__(self, "__dict__")
        if name in own and "_reads" in own and not name.startswith("_") and not is_group(value):
            own["_reads"].add(dotted(own["_key"], yaml_name(name)))
        return value


def watch(config: Config) -> tuple[Config, set[str]]:
    """The config, and the dotted names of the keys that are read of it, filled as they are."""
    reads: set[str] = set()
    return _watched(config, "", reads), reads


def peek(config: T) -> T:
    """The plain config or group behind a watched one, to look at a key without using it."""
    return cast(T, config.__dict__["_plain"]) if isinstance(config, _Watching) else config


def with_group(config: Config, name: str, group: object) -> Config:
    """The config with another top-level group; where it is watched, keys that are read of it count as before."""
    made = replace(peek(config), **{name: group})  # type: ignore[arg-type]  # a group of the kind that is there
    return _watched(made, "", config.__dict__["_reads"]) if isinstance(config, _Watching) else made


def whole(group: T) -> T:
    """The plain group behind a watched one, all of whose keys count as read: for whoever is handed it whole."""
    own = peek(group)
    if isinstance(group, _Watching) and is_group(own):
        group.__dict__["_reads"].update(key for key, *_ in walk(own, group.__dict__["_key"]))
    return own


def plain(group: object) -> dict[str, object]:
    """The keys of a group, not of those below it, as a mapping; all count as read."""
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
    """A subclass, so that the user's functions find the config to be what it says it is."""
    assert isinstance(group_class, type)
    return type(group_class.__name__, (_Watching, group_class), {})
