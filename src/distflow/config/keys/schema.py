"""The whole config, with groups that users register: as flat keys, as YAML, and compared with
another."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

from distflow.config.compose.typed_values import can_convert, nested, show
from distflow.config.keys.actor_rollout_ref import ActorRolloutRefConfig
from distflow.config.keys.algorithm import AlgorithmConfig, EmbodiedSamplingConfig
from distflow.config.keys.asynchrony import AsyncConfig
from distflow.config.keys.cost import CostConfig
from distflow.config.keys.critic import CriticConfig
from distflow.config.keys.dag import DagConfig
from distflow.config.keys.data import DataConfig
from distflow.config.keys.declare import KeyInfo, changed, collect, group, walk, yaml_name
from distflow.config.keys.distill import DistillConfig
from distflow.config.keys.profiler import ProfilerConfig
from distflow.config.keys.reward import (
    CustomRewardConfig,
    RewardConfig,
    RewardModelConfig,
    SrpoConfig,
)
from distflow.config.keys.trainer import TrainerConfig
from distflow.config.keys.trust import TrustConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_user_groups: dict[str, type] = {}


@dataclass(frozen=True)
class Config:
    """All keys of a run. Groups that a user registered are attributes too, stored in
    `user_groups`."""

    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    data: DataConfig = group(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    critic: CriticConfig = group(CriticConfig, taken_by="critic")
    reward_model: RewardModelConfig = group(RewardModelConfig)
    reward: RewardConfig = group(RewardConfig)
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig, taken_by="reward_fn")
    distill: DistillConfig = group(DistillConfig, taken_by="score_by_teacher")
    embodied_sampling: EmbodiedSamplingConfig = group(EmbodiedSamplingConfig)
    srpo: SrpoConfig = group(SrpoConfig)
    trainer: TrainerConfig = group(TrainerConfig)
    trust: TrustConfig = group(TrustConfig)
    dag: DagConfig = group(DagConfig)
    async_: AsyncConfig = group(AsyncConfig)
    profiler: ProfilerConfig = group(ProfilerConfig)
    cost: CostConfig = group(CostConfig)
    user_groups: dict[str, Any] = field(
        default_factory=lambda: {name: made() for name, made in _user_groups.items()}
    )

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not fields. During unpickling `user_groups` is not set yet.
        groups = self.__dict__.get("user_groups", {})
        if name in groups:
            return groups[name]
        if name in _user_groups:  # registered after this config was made
            return _user_groups[name]()
        raise AttributeError(f"the config has no group '{name}'")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *{**_user_groups, **self.user_groups}]


def register_config_group(name: str, config_class: type) -> None:
    """Add a group of custom keys: `config.<name>` is then an instance of the dataclass.

    Fields need defaults; `metadata={"help": ...}` describes them, or they are declared with
    `distflow.config.key`. Registering the same class again does nothing. Raises ValueError if the
    name is taken or a field cannot be read from YAML.
    """
    if _user_groups.get(name) is config_class:
        return
    if not name.isidentifier() or name in {*group_names(), *(item.name for item in fields(Config))}:
        raise ValueError(
            f"config group '{name}': the name is taken or no identifier; choose another one"
        )

    _check_group_class(name, config_class)
    _user_groups[name] = config_class
    schema_keys.cache_clear()


def group_names() -> list[str]:
    """The top-level groups by their names in YAML."""
    return [yaml_name(item.name) for item in fields(Config) if item.name != "user_groups"] + list(
        _user_groups
    )


@cache
def schema_keys() -> dict[str, KeyInfo]:
    """Every key by its dotted name, in the order of declaration."""
    defaults = Config()
    found: dict[str, KeyInfo] = {}
    for name in group_names():
        for key, info in collect(find_group(defaults, name), name).items():
            found[key] = info
    return found


def find_group(config: Config, name: str) -> "DataclassInstance":
    """A top-level group by its name in YAML."""
    return getattr(config, "async_" if name == "async" else name)


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The config with these values by their dotted names."""
    own = {name: changed(group, values, name) for name, group in config.user_groups.items()}
    return replace(changed(config, values), user_groups=own)


def _check_group_class(name: str, config_class: type) -> None:
    if not (isinstance(config_class, type) and is_dataclass(config_class)):
        raise ValueError(
            f"config group '{name}': {config_class!r} is no dataclass; decorate it with @dataclass"
        )

    hints = get_type_hints(config_class)
    for item in fields(config_class):
        if item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"config group '{name}': the field '{item.name}' needs a default")

        if is_dataclass(hints[item.name]):
            _check_group_class(f"{name}.{item.name}", hints[item.name])
        elif not can_convert(hints[item.name]):
            raise ValueError(
                f"config group '{name}': '{item.name}: {hints[item.name]}' cannot be read from "
                "YAML; use bool, int, float, str, Literal, list, tuple, dict or a union of them"
            )


def _read_resumable() -> Iterator[str]:
    file = Path(__file__).with_name("resumable.toml")
    for name, keys in tomllib.loads(file.read_text("utf-8")).items():
        for key in keys:
            yield f"{name}.{key}"


RESUMABLE = frozenset(_read_resumable())
"""Keys that may change when a run is resumed. Data are compared by fingerprint, not by path
(`changed_keys` ignores the files of domains too), actor_rollout_ref has the settings that
dag.policies gives a run's own policy, and changed code of a reward function is reported."""


def flatten(config: Config) -> dict[str, object]:
    """The value of each key by its dotted name, in the order of the schema."""
    found: dict[str, object] = {}
    for name in group_names():
        for key, _, value, _ in walk(find_group(config, name), name):
            found[key] = value
    return found


def to_dict(config: Config) -> dict[str, object]:
    """Nested dicts, lists and scalars for JSON and YAML."""
    values: dict[str, object] = {}
    for name in group_names():
        for key, _, value, spec in walk(find_group(config, name), name):
            values[key] = spec.plain(value)

    return nested(values)


def to_yaml(config: Config) -> str:
    """The whole config as YAML; loading it gives an equal config."""
    values = to_dict(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if text.replace("\n", "").isprintable():
        return text
    return yaml.safe_dump(values, sort_keys=False, width=120)  # escapes terminal control characters


def diff(before: Config, after: Config) -> list[tuple[str, object, object]]:
    old = flatten(before)
    new = flatten(after)
    return [
        (key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def changed_keys(before: Config, after: Config) -> list[tuple[str, object, object]]:
    """(key, before, after) of each difference, except keys that may change on resume and the files
    of domains."""
    resumable = RESUMABLE
    if _domains_without_files(before) == _domains_without_files(after):
        resumable |= {"data.domains"}
    return [change for change in diff(before, after) if change[0] not in resumable]


def _domains_without_files(config: Config) -> dict[str, object]:
    domains = config.data.domains
    return {name: replace(own, train_files=(), val_files=()) for name, own in domains.items()}


def show_value(info: KeyInfo, value: object) -> str:
    return show(info.spec.plain(value))
