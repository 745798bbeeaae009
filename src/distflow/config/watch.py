"""A config that notes which of its keys are read, so that one that was set and never read can be named."""

from dataclasses import fields, is_dataclass
from typing import TypeVar, cast

from distflow.config.keys import dotted, is_group, walk, yaml_name
from distflow.config.schema import Config

T = TypeVar("T")


class Watched:
    """Stands for a group of the config: the same attributes, but reading a key adds its dotted name to `reads`."""

    def __init__(self, value: object, key: str, reads: set[str]) -> None:
        self._value, self._key, self._reads = value, key, reads

    def __getattr__(self, name: str) -> object:
        found = getattr(type(self._value), name, None)
        if isinstance(found, property):
            return found.fget(self) if found.fget else None  # what it reads is noted, not that it was asked
        value = getattr(self._value, name)
        key = dotted(self._key, yaml_name(name))
        if is_dataclass(value):
            return Watched(value, key, self._reads)
        self._reads.add(key)
        return value

    def __dir__(self) -> list[str]:
        return dir(self._value)


def watch(config: Config) -> tuple[Config, set[str]]:
    """The config, and the dotted names of the keys that are read of it, filled as they are."""
    reads: set[str] = set()
    return cast(Config, Watched(config, "", reads)), reads


def peek(config: T) -> T:
    """The plain config or group behind a watched one, to look at a key without using it."""
    return cast(T, config._value) if isinstance(config, Watched) else config


def whole(group: T) -> T:
    """The plain group behind a watched one, all of whose keys count as read: for whoever is handed it whole."""
    if not isinstance(group, Watched):
        return group
    assert is_group(group._value)
    group._reads.update(key for key, *_ in walk(group._value, group._key))
    return cast(T, group._value)


def plain(group: object) -> dict[str, object]:
    """The keys of a group, not of those below it, as a mapping; all count as read."""
    value = whole(group)
    assert is_dataclass(value)
    return {item.name: getattr(value, item.name) for item in fields(value)}
