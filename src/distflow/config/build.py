"""From composed plain values to the typed config; what cannot be read leaves its default and is reported."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distflow.config.check import where
from distflow.config.errors import Problem
from distflow.config.keys import KeyInfo, dotted, is_group, yaml_name
from distflow.config.schema import Config, find_group, group_names, schema_keys
from distflow.config.values import Mismatch, convert

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")


class ConfigBuilder:
    """Builds one config. Afterwards `problems` says what could not be read, and `faulty` which keys those are."""

    def __init__(self, origins: Mapping[str, str]):
        self.origins = origins
        self.problems: list[Problem] = []
        self.faulty: set[str] = set()

    def build(self, values: Mapping[str, object]) -> Config:
        """The config with these values, defaults where there are none or where one cannot be read."""
        defaults = Config()
        made: dict[str, Any] = {
            name: self._group(find_group(defaults, name), values.get(name), name) for name in group_names()
        }
        own = {yaml_name(item.name): item.name for item in fields(Config) if item.name != "user_groups"}
        return Config(
            **{attribute: made[name] for name, attribute in own.items()},
            user_groups={name: group for name, group in made.items() if name not in own},
        )

    def _group(self, default: Group, values: object, prefix: str) -> Group:
        # A group that is no mapping has its problem already, among the misused keys.
        if not isinstance(values, Mapping):
            return default
        changes: dict[str, object] = {}
        for item in fields(default):
            name, value = dotted(prefix, yaml_name(item.name)), getattr(default, item.name)
            if yaml_name(item.name) not in values:
                continue
            given = values[yaml_name(item.name)]
            changes[item.name] = (
                self._group(value, given, name) if is_group(value) else self._value(given, schema_keys()[name])
            )
        return replace(default, **changes)

    def _value(self, given: object, info: KeyInfo) -> object:
        try:
            return info.spec.parse(given) if info.spec.parse else convert(given, info.annotation)
        except Mismatch as error:
            place = (info.name, where(info.name, self.origins))
            self.problems.append(Problem((place,), error.what, error.advice))
            self.faulty.add(info.name)
            return info.default
