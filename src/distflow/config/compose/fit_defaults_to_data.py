"""Shrinks defaults to fit: a batch to the data, a mini-batch to the batch, lengths to the model's
context. Values that were set are kept, and the rules check them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from distflow.builtin_names import CUSTOM_REWARD
from distflow.config.compose.setting_origins import COMMAND_LINE, IN_PYTHON, is_given
from distflow.config.derived_settings import RunLimits, is_rl, uses_custom_reward
from distflow.config.keys.reward import RewardPart
from distflow.config.keys.schema import Config, flatten, schema_keys, show_value, with_values
from distflow.config.rules.check_config import where
from distflow.config.rules.sizes import SIZE_RULES, Change, Misfit

_DEFAULT = "default"

NamedKey = tuple[str, object, str]
"""A key, its plain value, and what names it, in words."""


@dataclass(frozen=True)
class Fitted:
    """A default that was changed to fit. before, value: YAML text."""

    key: str
    before: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} instead of {self.before}: {self.why}"


def fit(config: Config, origins: Mapping[str, str], room: RunLimits) -> tuple[Config, list[Fitted]]:
    """The config with defaults reduced to the limits, and the changes. Deterministic."""
    config, changes = apply_changes(config, _domains(config, origins))
    config, made = apply_changes(config, _reward(config, origins))
    changes += made
    for rule in SIZE_RULES:
        ways = [_way(misfit, origins) for misfit in rule(config, room)]
        config, made = apply_changes(config, chain.from_iterable(ways))
        changes += made

    return config, changes


def _way(misfit: Misfit, origins: Mapping[str, str]) -> tuple[Change, ...]:
    """The first way to make it fit whose keys have values that nobody chose."""
    free = (
        way for way in misfit.ways if all(is_free(origins, key, *misfit.limits) for key, *_ in way)
    )
    return next(free, ())


def apply_changes(config: Config, changes: Iterable[Change]) -> tuple[Config, list[Fitted]]:
    """The config with these values, and the changes with the previous values."""
    if not (changes := [*changes]):
        return config, []

    made = []
    values = flatten(config)
    keys = schema_keys()

    for key, value, why in changes:
        made.append(
            Fitted(key, show_value(keys[key], values[key]), show_value(keys[key], value), why)
        )
        values[key] = value

    return with_values(config, {fitted.key: values[fitted.key] for fitted in made}), made


def is_free(origins: Mapping[str, str], key: str, *limits: str) -> bool:
    """Whether a key has its default or the value of a built-in preset; or a file's value, if one of
    `limits` was set above files: on the command line or in Python."""
    origin = where(key, origins)
    is_typed = (COMMAND_LINE, IN_PYTHON)
    on_top = origin not in is_typed and any(where(limit, origins) in is_typed for limit in limits)
    return not is_given(origin) or on_top


def _domains(config: Config, origins: Mapping[str, str]) -> Iterator[Change]:
    """Remove run-wide defaults for data and rewards if there are domains, which set their own."""
    if not config.data.domains:
        return

    empty: dict[str, object] = {
        "data.train_files": (),
        "data.val_files": (),
        "reward.functions": {},
    }
    values = flatten(config)

    for key, nothing in empty.items():
        if values[key] and is_free(origins, key):
            yield key, nothing, "data.domains is given"


def _reward(config: Config, origins: Mapping[str, str]) -> Iterator[Change]:
    """Let a custom reward function score the domains that name no other."""
    functions = config.reward.functions
    if (
        config.custom_reward_function.path is None
        or uses_custom_reward(config)
        or not is_rl(config)
    ):
        return

    ours = is_free(origins, "reward.functions")
    if (
        ours
        and config.data.domains
        and all(domain.reward for domain in config.data.domains.values())
    ):
        return

    if ours or (functions and _DEFAULT not in functions):
        named = {} if ours else functions
        value = {**named, _DEFAULT: (RewardPart(CUSTOM_REWARD),)}
        yield "reward.functions", value, "custom_reward_function.path is given"
