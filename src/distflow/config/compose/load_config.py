"""Loads a preset or file with overrides into a checked, frozen config with the origin of each key.

A value that cannot be read is replaced by the default and reported with all other problems at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from distflow.config.compose.check_paths import NEEDED_TO_TRAIN, find_missing
from distflow.config.compose.fit_defaults_to_data import (
    Fitted,
    NamedKey,
    apply_changes,
    fit,
    is_free,
)
from distflow.config.compose.setting_origins import (
    COMMAND_LINE,
    IN_PYTHON,
    Setting,
    display,
    is_given,
    is_preset,
    settings_of_value,
)
from distflow.config.compose.typed_values import Mismatch, flat, parse_value
from distflow.config.compose.unknown_keys import (
    is_known,
    judge_settings,
    look_up,
    parents,
    what_replaces,
)
from distflow.config.derived_settings import (
    CUSTOM,
    RunLimits,
    is_rl,
    may_have_critic,
    pipeline_name,
)
from distflow.config.keys.schema import (
    Config,
    flatten,
    group_names,
    schema_keys,
    show_value,
    with_values,
)
from distflow.config.migration.tables import NOT_GIVEN, as_override, find_names
from distflow.config.rules import ACTOR, MODEL, ROLLOUT
from distflow.config.rules.check_config import (
    find_problems,
    find_size_problems,
    where,
    within_bounds,
)
from distflow.config.rules.sizes import Change
from distflow.errors import ConfigError, Problem, UserError, hint
from distflow.import_target import LoadError, load_modules

if TYPE_CHECKING:
    from distflow.config.compose.composition import Composition

# Keys that do not change the training: memory limits, names of the run, other spellings of a value.
_WITHOUT_EFFECT = (
    "trainer.project_name",
    "trainer.experiment_name",
    "algorithm.allow_group_of_one",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{ROLLOUT}.max_num_seqs",
    f"{ROLLOUT}.free_cache_engine",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
)


@dataclass(frozen=True)
class Loaded:
    """A config and its origins: key → "file:line" or "command line", for each key that was set.

    fitted: defaults that were changed to fit. notes: lines about accepted settings of another
    system.
    """

    config: Config
    origins: dict[str, str]
    fitted: tuple[Fitted, ...] = ()
    notes: tuple[str, ...] = ()

    def origin(self, key: str) -> str:
        """Where a key was set, or "default"; for a value that was changed to fit, the reason."""
        why = [fitted.why for fitted in self.fitted if fitted.key == key]
        if why:
            return f"made to fit: {why[-1]}"
        return where(key, self.origins)

    @property
    def set_keys(self) -> dict[str, str]:
        """Keys that were set to a value other than the default, with their origins; they must have
        an effect."""
        values = flatten(self.config)
        keys = schema_keys()
        return {
            key: origin
            for key, origin in self.origins.items()
            if key in keys and values[key] != keys[key].default
        }


def load_config(
    preset_or_file: str,
    overrides: Sequence[str] = (),
    *,
    complete: bool = True,
    trust_code: bool = True,
    needed: Collection[str] = (),
    base: str = "grpo",
) -> Loaded:
    """Compose, read and check a config. Raises ConfigError with all problems at once.

    preset_or_file: e.g. `grpo`, or a .yaml file, which may build on a preset or on files beside it
    (`defaults: [grpo, _self_]`), or a method's .py file, which is then the last of
    `trainer.imports`. base: the preset that a file builds on if it names none and its
    keys select no built-in pipeline. overrides: Hydra's grammar, `key=value`, `+key=value`,
    `++key=value`, `~key`. complete: False allows a missing model and missing data, as in a preset.
    needed: keys whose files and folders must exist, e.g. `check_paths.NEEDED_TO_TRAIN`. trust_code:
    False imports no user modules; needing one to resolve a group is then a problem.
    """
    try:
        # Importing Hydra takes longer than everything else here.
        from distflow.config.compose import composition

        source = composition.find_source(preset_or_file)
        import_problems: list[Problem] = []
        register = partial(_register_user_groups, import_problems, trust_code)
        composed = composition.compose(source, overrides, base, register)
        renamed = _rename(composed)
        misused, accepted = judge_settings(composed.settings, composed.values)
        problems = [*composed.problems, *import_problems, *misused]
        if composed.failure is not None:
            raise ConfigError(problems or [composed.failure])

        known = [setting for setting in composed.settings if is_known(setting.key)]
        origins = _origins(known, composed.deleted)
        loaded = _finish(
            composed.values,
            origins,
            problems,
            complete=complete,
            refused=composed.refused,
            needed=needed,
        )
        notes = []
        if composed.base is not None:
            notes = [f"{display(source)} has no defaults: it builds on {composed.base}"]
        notes += [*renamed, *accepted.values(), *_differences_from_verl(loaded, accepted)]
        return replace(loaded, notes=tuple(notes))
    # of this file: those of files that keys name are problems of the keys
    except (RecursionError, OSError) as error:
        what = "its keys, or those of an override, are nested too deeply"
        if isinstance(error, OSError):
            what = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(((f"'{preset_or_file}'", COMMAND_LINE),), what)]) from error


def check_named_files(loaded: Loaded) -> None:
    """Raises ConfigError if a file that the config names is missing, as a run does. A model may be
    elsewhere."""
    models = {f"{MODEL}.path", f"{MODEL}.tokenizer_path", "critic.model.path"}
    if problems := [*find_missing(loaded.config, loaded.origins, NEEDED_TO_TRAIN - models)]:
        raise ConfigError(problems)


def fit_to(loaded: Loaded, room: RunLimits) -> Loaded:
    """The config with defaults that fit the limits. Raises ConfigError with all sizes that do not
    fit."""
    config, fitted = fit(loaded.config, loaded.origins, room)
    if problems := find_size_problems(config, loaded.origins, room):
        raise ConfigError(problems)
    if fitted:
        return replace(loaded, config=config, fitted=(*loaded.fitted, *fitted))
    return loaded


def with_changes(loaded: Loaded, changes: Sequence[Change], complete: bool = False) -> Loaded:
    """The config with unset values that follow from others. complete: whether missing required keys
    are problems. Raises ConfigError with all keys that contradict them."""
    config, fitted = apply_changes(loaded.config, changes)
    if problems := find_problems(config, loaded.origins, set(), complete):
        raise ConfigError(problems)
    return replace(loaded, config=config, fitted=(*loaded.fitted, *fitted))


def with_named(loaded: Loaded, named: Iterable[NamedKey]) -> Loaded:
    """The config with keys that parts of the pipeline name, complete. A mapping that is no key's
    value is a group.

    Raises UserError for an unknown key, an unreadable value, and a key that is set elsewhere to
    another value; ConfigError for other keys that contradict them, or are missing.
    """
    changes = dict[str, Change]()
    keys = schema_keys()
    values = flatten(loaded.config)

    leaves = list[tuple[str, object, str]]()
    for group, below, by in named:
        for key, given in flat({group: below}, "", keys).items():
            leaves.append((key, given, by))

    for key, given, by in leaves:
        if key not in keys:
            raise UserError(f"{by} names {key}, but there is no such key{hint(key, keys)}")

        try:
            value = parse_value(given, keys[key])
        except Mismatch as err:
            raise UserError(f"{by} names {key}, which {err.what}: {err.advice}") from err

        if key in changes:
            _, before, origin = changes[key]
            is_set = True
        else:
            before = values[key]
            origin = loaded.origin(key)
            is_set = before not in ((), {}, None) and not is_free(loaded.origins, key)

        if is_set and before != value:
            shown = show_value(keys[key], value)
            other = show_value(keys[key], before)
            raise UserError(
                f"{by} names {key}={shown}, but it is {other} ({origin}): remove one of them"
            )

        changes[key] = (key, value, f"{by} names it")

    changed = [change for key, change in changes.items() if change[1] != values[key]]
    return with_changes(loaded, changed, complete=True)


def differing(loaded: Loaded, theirs: Loaded) -> list[tuple[str, str, str]]:
    """(key, value here, value there) of keys that the user did not set and a verl preset sets
    differently."""
    here = flatten(loaded.config)
    there = flatten(theirs.config)
    infos = schema_keys()
    without_effect = set(_WITHOUT_EFFECT)
    if not may_have_critic(loaded.config):
        without_effect.add("algorithm.lam")

    found = []
    for key in theirs.origins:
        if key not in infos or here[key] == there[key] or key in without_effect:
            continue
        if not is_given(loaded.origin(key)):
            info = infos[key]
            found.append((key, show_value(info, here[key]), show_value(info, there[key])))

    return found


def is_verls(origin: str) -> bool:
    """Whether the origin of a key is a preset with verl's defaults."""
    return origin.startswith("presets/verl_")


@cache
def preset_config(name: str) -> Config:
    return load_config(name, complete=False).config


def config_from_dict(values: Mapping[str, object], *, judge: bool = True) -> Config:
    """A config from nested plain values; missing keys have their defaults. Raises ConfigError.

    judge: False skips the checks, and keys of earlier versions, e.g. for a finished run whose files
    may be gone.
    """
    settings = list[Setting]()
    for name, value in values.items():
        settings += settings_of_value(str(name), value, IN_PYTHON)
    if not judge:
        settings = [setting for setting in settings if not what_replaces(setting.key)]
    problems = judge_settings(settings, values)[0]

    return _finish(values, _origins(settings, []), problems, judge).config


def config_of_run(values: Mapping[str, object]) -> Config:
    """The saved config of a run, without checks, since its files may be gone. Groups from user
    modules are omitted if they are not registered now. Raises UserError."""
    known = group_names()
    config = config_from_dict(
        {name: value for name, value in values.items() if name in known}, judge=False
    )
    if config.actor_rollout_ref.model.path is None:
        raise UserError("the config of that run names no model (actor_rollout_ref.model.path)")
    return config


_RENAMED = {"dag.custom_pipeline_fn": "dag.pipeline"}
"""siiRL's names of keys that mean the same here."""


def _rename(composed: "Composition") -> list[str]:
    """Give keys that have only another name theirs, if that one is not set as well. Returns a line
    for each."""
    lines = []
    settings = composed.settings
    for place, setting in enumerate(settings):
        ours = _RENAMED.get(setting.key)
        value = setting.value
        if (
            ours is None
            or value in (None, NOT_GIVEN)
            or any(other.key == ours and not is_preset(other.where) for other in settings)
        ):
            continue

        group, _, name = ours.rpartition(".")

        # a group of plain values
        look_up(composed.values, group)[name] = value  # type: ignore[index]
        settings[place] = replace(setting, key=ours)
        lines.append(f"{setting.key}={as_override(value)} (siiRL): here it is {ours}")

    return lines


def build(
    values: Mapping[str, object], origins: Mapping[str, str]
) -> tuple[Config, list[Problem], set[str]]:
    """The config with these nested values and defaults for the rest; the problems of unreadable
    values; and their keys."""
    read: dict[str, object] = {}
    problems = []
    faulty = set()
    for name, info in schema_keys().items():
        given = look_up(values, name)
        if given is NOT_GIVEN:
            continue

        try:
            read[name] = parse_value(given, info)
        except Mismatch as error:
            problems.append(Problem(((name, where(name, origins)),), error.what, error.advice))
            faulty.add(name)

    return with_values(Config(), read), problems, faulty


def _finish(
    values: Mapping[str, object],
    origins: dict[str, str],
    problems: Sequence[Problem],
    judge: bool = True,
    complete: bool = True,
    refused: Collection[str] = (),
    needed: Collection[str] = (),
) -> Loaded:
    config, unreadable, faulty = build(values, origins)
    if (policy := config.dag.policy) and (settings := config.dag.policies.get(policy)):
        changed = {f"actor_rollout_ref.{name}": value for name, value in settings.items()}
        origin = f"dag.policies.{policy}, {where('dag.policies', origins)}"
        # reading it again changes nothing
        used = {"dag.policies": {**config.dag.policies, policy: {}}}
        config = with_values(config, changed | used)
        origins = origins | dict.fromkeys(changed, origin)

    faulty |= set(refused)
    problems = [*problems, *unreadable]
    fitted: list[Fitted] = []
    if judge:
        config, wrong, out_of_bounds = within_bounds(config, origins)
        problems = [*problems, *wrong]
        faulty = faulty | out_of_bounds
        config, fitted = fit(config, origins, RunLimits())

        # Nodes of a custom pipeline may name data, and are only known when it is built.
        problems += find_problems(
            config, origins, faulty, complete and pipeline_name(config) != CUSTOM
        )
        problems += find_missing(config, origins, set(needed) - faulty)

    if problems:
        raise ConfigError(problems)
    return Loaded(config, origins, tuple(fitted))


def _differences_from_verl(loaded: Loaded, accepted: Iterable[str]) -> list[str]:
    """A note if verl's keys were accepted on a preset without verl's defaults."""
    has_verl_keys = any("verl" in find_names(key) for key in accepted)
    if not has_verl_keys or not is_rl(loaded.config) or any(map(is_verls, loaded.origins.values())):
        return []

    preset = "verl_ppo" if may_have_critic(loaded.config) else "verl_grpo"
    keys = differing(loaded, load_config(preset, complete=False))
    if not keys:
        return []

    listed = ", ".join(f"{key}={here} (verl {theirs})" for key, here, theirs in keys)
    return [f"verl has other defaults, which the preset {preset} has; here {listed}"]


def _register_user_groups(
    problems: list[Problem], trust_code: bool, settings: Sequence[Setting]
) -> None:
    """Import the user's modules if they may register an unknown top-level group."""
    unknown = {setting.key.partition(".")[0] for setting in settings} - set(group_names())
    named = [setting for setting in settings if setting.key == "trainer.imports"]
    if not unknown or not named or not named[-1].value:
        return

    given = named[-1].value
    if isinstance(given, list):
        modules = [str(each) for each in given]
    else:
        modules = [str(given)]

    places = (("trainer.imports", named[-1].where),)
    if not trust_code:
        what = (
            f"{', '.join(modules)} may register {', '.join(sorted(unknown))}, but was not imported"
        )
        problems.append(Problem(places, what, "read that code; --trust-code imports it"))
        return

    try:
        load_modules(modules)
    except LoadError as error:
        advice = "it must be importable from here: install it, or put its folder on PYTHONPATH"
        problems.append(Problem(places, str(error), advice))


def _origins(settings: Sequence[Setting], deleted: Sequence[str]) -> dict[str, str]:
    """The last place that set each key; an open mapping has an origin for each name too."""
    keys = schema_keys()
    origins: dict[str, str] = {}
    for setting in settings:
        if setting.key in keys or not setting.is_group:
            origins[setting.key] = setting.where
        for parent in parents(setting.key):
            if parent in keys:
                origins[parent] = setting.where

    for gone in deleted:
        origins = {
            key: origin
            for key, origin in origins.items()
            if key != gone and gone not in parents(key)
        }

    return origins
