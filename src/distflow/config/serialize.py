"""A config for people and for files: flat, as YAML, compared with another."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import yaml

from distflow.config.compose.values import show
from distflow.config.domains import DomainConfig
from distflow.config.keys.declare import KeyInfo, is_group, walk, yaml_name
from distflow.config.keys.schema import Config, find_group, group_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PATHS = (
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "critic.model.path",
    "custom_reward_function.path",
    "custom_reward_function.name",
)

_DEVICES = (
    "trainer.launcher",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.allocation",
    "trainer.worker_cpus",
    "trainer.worker_memory_mb",
    "trainer.worker_env",
    "trainer.max_held_mb",
    "trainer.peers_timeout_s",
    "reward.num_actors",
    "reward.actor_cpus",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.weight_update_mode",
)

RESUMABLE: frozenset[str] = frozenset(
    (
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.logger",
        "trainer.resume_mode",
        *_DEVICES,
        "reward.timeout_s",
        "reward.max_error_rate",
        *_PATHS,
    )
)
"""Keys that may change when a run is resumed: how long, how often, on which devices, where things lie (the files of
domains too: `changed_keys`), time limits. What lies behind the paths of data is compared by fingerprint, not by name;
that a reward function has other code is told."""


def flatten(config: Config) -> dict[str, object]:
    """Every key's value by its dotted name, in the order of the schema."""
    flat: dict[str, object] = {}
    for name in group_names():
        flat |= {key: value for key, _, value, _ in walk(find_group(config, name), name)}
    return flat


def to_dict(config: Config) -> dict[str, object]:
    """Nested dicts, lists and scalars that JSON and YAML can hold, with the names of the YAML."""
    return {name: _plain_group(find_group(config, name)) for name in group_names()}


def to_yaml(config: Config) -> str:
    """The whole config as YAML; loading it again gives an equal one."""
    values = to_dict(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if text.replace("\n", "").isprintable():
        return text
    return yaml.safe_dump(values, sort_keys=False, width=120)  # nothing in it can act on a terminal or an editor


def diff(before: Config, after: Config) -> list[tuple[str, object, object]]:
    """The keys in which two configs differ, with both values."""
    old, new = flatten(before), flatten(after)
    return [(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]


def changed_keys(before: Config, after: Config) -> list[tuple[str, object, object]]:
    """The same without the keys that may change on resume; nor does a domain by where its files lie."""
    same_domains = _without_files(before) == _without_files(after)
    resumable = RESUMABLE | {"data.domains"} if same_domains else RESUMABLE
    return [change for change in diff(before, after) if change[0] not in resumable]


def _without_files(config: Config) -> dict[str, DomainConfig]:
    return {name: replace(own, train_files=(), val_files=()) for name, own in config.data.domains.items()}


def show_value(info: KeyInfo, value: object) -> str:
    """A key's value as it would be written in YAML."""
    return show(info.spec.plain(value) if info.spec.plain else value)


def _plain_group(instance: "DataclassInstance") -> dict[str, object]:
    plain: dict[str, object] = {}
    for item in fields(instance):
        value = getattr(instance, item.name)
        if is_group(value):
            plain[yaml_name(item.name)] = _plain_group(value)
        else:
            spec = item.metadata.get("key")
            plain[yaml_name(item.name)] = _plain_value(spec.plain(value) if spec and spec.plain else value)
    return plain


def _plain_value(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain_value(item) for name, item in value.items()}
    return value
