"""From composed plain values to the typed config; what cannot be read leaves its default and is reported.

`load_config`: from a preset or file and overrides to a checked, frozen config that knows where each key was set.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from distflow.config.compose.check_paths import find_missing
from distflow.config.compose.loaded import Loaded
from distflow.config.compose.origins import COMMAND_LINE, Setting, settings_of_value
from distflow.config.compose.shrink_to_fit import Change, Fitted, apply_changes, fit
from distflow.config.compose.unknown_keys import is_known, judge_settings, parents
from distflow.config.compose.values import Mismatch, convert
from distflow.config.derived_settings import RunLimits
from distflow.config.extension_points import find_unregistered
from distflow.config.keys.declare import KeyInfo, dotted, is_group, yaml_name
from distflow.config.keys.schema import Config, find_group, group_names, schema_keys
from distflow.config.migration.verl_defaults import differing, verl_preset
from distflow.config.rules.check import find_problems, find_size_problems, where
from distflow.config.serialize import to_dict
from distflow.errors import ConfigError, Problem, UserError
from distflow.import_target import LoadError, load_modules

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


def load_config(
    preset_or_file: str,
    overrides: Sequence[str] = (),
    *,
    complete: bool = True,
    trust_code: bool = True,
    needed: Collection[str] = (),
) -> Loaded:
    """Compose, read and check a config. Raises ConfigError with all problems at once.

    preset_or_file: `grpo`, or a .yaml file, which may build on a preset or its neighbours (`defaults: [grpo, _self_]`).
    overrides: Hydra's grammar, `key=value`, `+key=value`, `++key=value`, `~key`.
    complete: False lets the model and the data be missing, to look at a preset that no run can start from yet.
    needed: keys whose files and folders must be there, as in `paths.NEEDED_TO_TRAIN`.
    trust_code: False imports no module of the user's; one that is needed to know a group is then a problem.
    """
    try:
        return _load(preset_or_file, overrides, complete, trust_code, needed)
    except ConfigError as error:
        # A name that is unknown because its file lacks a line in a table.
        lacking = [part for part in find_unregistered() if f"'{part.name}'" in str(error)]
        if not lacking:
            raise
        problems = [Problem(((part.file, "a file of the package"),), str(part)) for part in lacking]
        raise ConfigError([*error.problems, *problems]) from error
    except RecursionError as error:
        place = ((f"'{preset_or_file}'", COMMAND_LINE),)
        raise ConfigError([Problem(place, "its keys, or those of an override, lie too deep in one another")]) from error


def _load(
    preset_or_file: str, overrides: Sequence[str], complete: bool, trust_code: bool, needed: Collection[str]
) -> Loaded:
    # Hydra costs more than everything else here: it is imported where it is used.
    from distflow.config.compose import composition

    source = composition.find_source(preset_or_file)
    composed = composition.compose_values(source, overrides, _plain_defaults(), is_known)
    import_problems: list[Problem] = []
    registered = composed.failure is None and _register_user_groups(
        composed.values, composed.settings, import_problems, trust_code
    )
    if registered:
        composed = composition.compose_values(source, overrides, _plain_defaults(), is_known)
    judgement = judge_settings(composed.settings, composed.values)
    problems = [*composed.problems, *import_problems, *judgement.problems]
    if composed.failure is not None:
        raise ConfigError(problems or [composed.failure])
    known = [setting for setting in composed.settings if is_known(setting.key)]
    origins = _origins(known, composed.deleted)
    loaded = _finish(composed.values, origins, problems, complete=complete, refused=composed.refused, needed=needed)
    return replace(loaded, notes=(*judgement.accepted.values(), *_differences_from_verl(loaded, judgement.accepted)))


def fit_to(loaded: Loaded, room: RunLimits) -> Loaded:
    """The same in the room that the run turned out to have. Raises ConfigError with all sizes that do not fit it."""
    config, fitted = fit(loaded.config, loaded.origins, room)
    problems = find_size_problems(config, loaded.origins, room)
    if problems:
        raise ConfigError(problems)
    if not fitted:
        return loaded
    return replace(loaded, config=config, fitted=(*loaded.fitted, *fitted))


def with_changes(loaded: Loaded, changes: Sequence[Change]) -> Loaded:
    """The same with values that nobody chose and that follow from others. Raises ConfigError with all keys that do not
    go with them."""
    config, fitted = apply_changes(loaded.config, changes)
    if problems := find_problems(config, loaded.origins, set(), complete=False):
        raise ConfigError(problems)
    return replace(loaded, config=config, fitted=(*loaded.fitted, *fitted))


def _differences_from_verl(loaded: Loaded, accepted: Iterable[str]) -> list[str]:
    preset = verl_preset(loaded, accepted)
    if preset is None:
        return []
    found = differing(loaded, load_config(preset, complete=False))
    listed = ", ".join(f"{key}={here} (verl {there})" for key, here, there in found)
    return [f"verl's defaults are others, and the preset {preset} has them: here {listed}"] if found else []


@cache
def preset_config(name: str) -> Config:
    """The config of a preset as it is, without a model or data."""
    return load_config(name, complete=False).config


def config_from_dict(values: Mapping[str, object], *, judge: bool = True) -> Config:
    """A config from nested plain values; what is left out has its default. Raises ConfigError.

    judge: False only reads the values (of a run that was, say, whose checkpoint lay where nothing is now).
    """
    settings = [
        setting for name, value in values.items() for setting in settings_of_value(str(name), value, "given in Python")
    ]
    problems = judge_settings(settings, values).problems
    return _finish(values, _origins(settings, []), problems, judge).config


def config_of_run(values: Mapping[str, object]) -> Config:
    """The config that a run kept, read and not judged: what it names may be gone. Groups that its modules registered
    are left out where nothing registered them. Raises UserError."""
    known = group_names()
    config = config_from_dict({name: value for name, value in values.items() if name in known}, judge=False)
    if config.actor_rollout_ref.model.path is None:
        raise UserError("the config of that run names no model (actor_rollout_ref.model.path)")
    return config


def _finish(
    values: Mapping[str, object],
    origins: dict[str, str],
    problems: Sequence[Problem],
    judge: bool = True,
    complete: bool = True,
    refused: Collection[str] = (),
    needed: Collection[str] = (),
) -> Loaded:
    builder = ConfigBuilder(origins)
    config = builder.build(values)
    builder.faulty.update(refused)
    problems = [*problems, *builder.problems]
    fitted: list[Fitted] = []
    if judge:
        config, fitted = fit(config, origins, RunLimits())
        problems += find_problems(config, origins, builder.faulty, complete)
        problems += find_missing(config, origins, set(needed) - builder.faulty)
    if problems:
        raise ConfigError(problems)
    return Loaded(config, origins, tuple(fitted))


def _plain_defaults() -> dict[str, object]:
    """The schema's defaults as plain values, without lists and mappings: those are replaced, not merged into."""
    plain = to_dict(Config())
    for name, info in schema_keys().items():
        if isinstance(info.default, dict | tuple | list):
            *groups, last = name.split(".")
            holder = plain
            for part in groups:
                inner = holder[part]
                assert isinstance(inner, dict), f"{name} lies in a group"
                holder = inner
            del holder[last]
    return plain


def _register_user_groups(
    values: Mapping[str, object], settings: Sequence[Setting], problems: list[Problem], trust_code: bool
) -> bool:
    """Import the user's modules if a top-level group is unknown that they may register. True where one was."""
    unknown = {setting.key.partition(".")[0] for setting in settings} - set(group_names())
    trainer = values.get("trainer")
    modules = trainer.get("imports") if isinstance(trainer, Mapping) else None
    if not unknown or not modules:
        return False
    modules = [modules] if isinstance(modules, str) else list(modules)
    origin = where("trainer.imports", _origins(settings, []))
    if not trust_code:
        what = f"{', '.join(map(str, modules))} may register {', '.join(sorted(unknown))}, and was not imported"
        problems.append(Problem((("trainer.imports", origin),), what, "read that code; --trust-code imports it"))
        return False
    try:
        load_modules(modules)
    except LoadError as error:
        advice = "it must be importable from here: install it, or put its folder on PYTHONPATH"
        problems.append(Problem((("trainer.imports", origin),), str(error), advice))
    return bool(unknown & set(group_names()))


def _origins(settings: Sequence[Setting], deleted: Sequence[str]) -> dict[str, str]:
    """The last place that set each key; a mapping of the user's own names has one origin for each name too."""
    keys = schema_keys()
    origins: dict[str, str] = {}
    for setting in settings:
        if setting.key in keys or not setting.is_group:
            origins[setting.key] = setting.where
        for parent in parents(setting.key):
            if parent in keys:
                origins[parent] = setting.where
    for gone in deleted:
        origins = {key: origin for key, origin in origins.items() if key != gone and gone not in parents(key)}
    return origins
