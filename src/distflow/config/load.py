"""`load_config`: from a preset or file and overrides to a checked, frozen config that knows where each key was set."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from distflow.config.check import find_problems, where
from distflow.config.errors import ConfigError, Problem
from distflow.config.keys import KeyInfo, dotted, yaml_name
from distflow.config.schema import Config, find_group, group_names, schema_keys
from distflow.config.show import flatten, to_dict, to_yaml
from distflow.config.sources import COMMAND_LINE, Setting
from distflow.config.unknown import holds_replaced, suggest
from distflow.config.values import Mismatch, convert


@dataclass(frozen=True)
class Loaded:
    """A config and where it came from. origins: key → "file:line" or "command line", for each key that was set.
    text: the resolved config as YAML."""

    config: Config
    origins: dict[str, str]
    text: str

    def origin(self, key: str) -> str:
        """Where a key was set, or "default"."""
        return where(key, self.origins)

    @property
    def set_keys(self) -> dict[str, str]:
        """The keys that somebody set to something else than the default, with their origin: those must do something."""
        values, keys = flatten(self.config), schema_keys()
        return {key: origin for key, origin in self.origins.items() if key in keys and values[key] != keys[key].default}


def load_config(preset_or_file: str, overrides: Sequence[str] = ()) -> Loaded:
    """Compose, read and check a config. Raises ConfigError with all problems at once.

    preset_or_file: `grpo`, or a .yaml file, which may build on a preset or its neighbours (`defaults: [grpo, _self_]`).
    overrides: Hydra's grammar, `key=value`, `+key=value`, `++key=value`, `~key`.
    """
    # Hydra is half of what importing this package would cost.
    from distflow.config import composition

    source = composition.find_source(preset_or_file)
    composed = composition.compose_values(source, overrides, _plain_defaults(), _known_names())
    if composed.failure:
        problems = [*composed.problems, *_unknown_problems(composed.settings)]
        raise ConfigError(problems or [composed.failure])
    if _register_user_groups(composed.values, composed.settings, composed.problems):
        composed = composition.compose_values(source, overrides, _plain_defaults(), _known_names())
    unknown = _unknown_problems(composed.settings)
    return _build(composed.values, _origins(composed.settings, composed.deleted), [*composed.problems, *unknown])


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """A checked config from nested plain values; what is left out has its default. Raises ConfigError."""
    settings = [setting for name, value in values.items() for setting in _settings_in_python(str(name), value)]
    return _build(dict(values), _origins(settings, []), _unknown_problems(settings)).config


def _settings_in_python(name: str, value: Any) -> list[Setting]:
    from distflow.config.sources import settings_of_value

    return list(settings_of_value(name, value, "given in Python"))


def _plain_defaults() -> dict[str, Any]:
    """The schema's defaults as plain values, without lists and mappings: those are replaced, not merged into."""
    plain = to_dict(Config())
    for name, info in schema_keys().items():
        if isinstance(info.default, dict | tuple | list):
            *groups, last = name.split(".")
            holder = plain
            for part in groups:
                holder = holder[part]
            del holder[last]
    return plain


def _known_names() -> set[str]:
    """Keys, the groups above them, and `key.*` for each key that holds names of the user's own."""
    known: set[str] = set()
    for name, info in schema_keys().items():
        known.add(name)
        if info.is_map:
            known.add(f"{name}.*")
        while name := name.rpartition(".")[0]:
            known.add(name)
    return known


def _register_user_groups(values: Mapping[str, Any], settings: Sequence[Setting], problems: list[Problem]) -> bool:
    """Import the user's modules if a top-level group is unknown that they may register. True where one was."""
    unknown = {setting.key.partition(".")[0] for setting in settings} - set(group_names())
    trainer = values.get("trainer")
    modules = trainer.get("imports") if isinstance(trainer, Mapping) else None
    if not unknown or not modules:
        return False
    for module in [modules] if isinstance(modules, str) else modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            origin = where("trainer.imports", _origins(settings, []))
            advice = "install it, or put its folder on PYTHONPATH"
            problems.append(Problem((("trainer.imports", origin),), f"'{module}' cannot be imported: {error}", advice))
    return bool(unknown & set(group_names()))


def _unknown_problems(settings: Sequence[Setting]) -> list[Problem]:
    """Settings that no key takes, the outermost name of each only, and groups that were given a plain value."""
    known, keys = _known_names(), schema_keys()
    problems: list[Problem] = []
    reported: list[str] = []
    for setting in settings:
        if any(setting.key.startswith(f"{outer}.") for outer in reported):
            continue
        inside_map = any(f"{name}.*" in known and setting.key.startswith(f"{name}.") for name in _parents(setting.key))
        if setting.key not in known and not inside_map:
            if setting.is_group and holds_replaced(setting.key):
                continue  # what it holds gets the message
            problems.append(
                Problem(((setting.key, setting.where),), "there is no such key", suggest(setting.key, keys))
            )
            reported.append(setting.key)
        elif setting.key in keys and setting.is_group and not keys[setting.key].is_map:
            reported.append(setting.key)  # what is wrong with its value is said where it is read
        elif setting.has_dots and setting.key in known:
            advice = (
                "write one level a line: " + ": {".join(setting.key.split(".")) + ": ..." + "}" * setting.key.count(".")
            )
            problems.append(Problem(((setting.key, setting.where),), "has dots, which YAML reads as one name", advice))
            reported.append(setting.key)
        elif setting.key in known and setting.key not in keys and not setting.is_group:
            advice = f"write keys below it, e.g. {next(name for name in keys if name.startswith(setting.key + '.'))}"
            problems.append(Problem(((setting.key, setting.where),), "is a group of keys, not a value", advice))
    return problems


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _origins(settings: Sequence[Setting], deleted: Sequence[str]) -> dict[str, str]:
    """The last place that set each key; a mapping of the user's own names has one origin for each name too."""
    keys = schema_keys()
    origins: dict[str, str] = {}
    for setting in settings:
        if setting.key in keys or not setting.is_group:
            origins[setting.key] = setting.where
        for parent in _parents(setting.key):
            if parent in keys:
                origins[parent] = setting.where
    for gone in deleted:
        origins = {key: origin for key, origin in origins.items() if key != gone and not key.startswith(f"{gone}.")}
    return origins


def _build(values: Mapping[str, Any], origins: dict[str, str], problems: list[Problem]) -> Loaded:
    defaults = Config()
    faulty: set[str] = set()
    made: dict[str, Any] = {}
    for name in group_names():
        made[name] = _build_group(find_group(defaults, name), values.get(name), name, origins, problems, faulty)
    own = {yaml_name(item.name): item.name for item in fields(Config) if item.name != "user_groups"}
    config = Config(
        **{attribute: made[name] for name, attribute in own.items()},
        user_groups={name: group for name, group in made.items() if name not in own},
    )
    problems = [*problems, *find_problems(config, origins, faulty)]
    if problems:
        raise ConfigError(problems)
    return Loaded(config, origins, to_yaml(config))


def _build_group(
    default: Any, values: Any, prefix: str, origins: dict[str, str], problems: list[Problem], faulty: set[str]
) -> Any:
    """The group with the given values; a value that cannot be read leaves its default and is noted as faulty."""
    if not isinstance(values, Mapping):
        return default
    changes: dict[str, Any] = {}
    for item in fields(default):
        name, value = dotted(prefix, yaml_name(item.name)), getattr(default, item.name)
        if yaml_name(item.name) not in values:
            continue
        given = values[yaml_name(item.name)]
        if is_dataclass(value):
            changes[item.name] = _build_group(value, given, name, origins, problems, faulty)
            continue
        try:
            changes[item.name] = _read(given, schema_keys()[name])
        except Mismatch as error:
            problems.append(Problem(((name, where(name, origins)),), error.what, error.advice))
            faulty.add(name)
    return replace(default, **changes)


def _read(given: Any, info: KeyInfo) -> Any:
    return info.spec.parse(given) if info.spec.parse else convert(given, info.annotation)


__all__ = ["COMMAND_LINE", "Loaded", "config_from_dict", "load_config"]
