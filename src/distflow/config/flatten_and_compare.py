"""A config as flat keys, as YAML, and compared with another."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import yaml

from distflow.config.compose.values import nested, show
from distflow.config.keys.declare import KeyInfo, walk
from distflow.config.keys.schema import Config, find_group, group_names, schema_keys

_RESUMABLE = {
    "trainer": (
        *("total_epochs", "total_training_steps", "stop_when", "save_hf_model", "logger", "resume_mode"),
        *(f"{what}_freq{unit}" for what in ("save", "test") for unit in ("", "_epochs", "_secs")),
        *("project_name", "experiment_name", "default_local_dir"),
        *("launcher", "nnodes", "n_gpus_per_node", "allocation", "devices"),
        *("worker_cpus", "worker_memory_mb", "worker_env", "worker_roles"),
        *("device", "max_held_mb", "peers_timeout_s", "max_restarts"),
        *(f"slurm.{name}" for name in ("partition", "account", "time", "cpus_per_node", "args")),
    ),
    "data": ("train_files", "val_files"),
    "actor_rollout_ref": ("model.path", "model.tokenizer_path", "actor.strategy", "actor.weight_update_mode"),
    "critic": ("model.path",),
    "custom_reward_function": ("path", "name"),
    "dag": ("policies",),
    "reward": ("num_actors", "actor_cpus", "timeout_s", "max_error_rate"),
}
RESUMABLE = frozenset(f"{group}.{name}" for group, names in _RESUMABLE.items() for name in names)
"""Keys that may change when a run is resumed. Data are compared by fingerprint, not by path (`changed_keys` ignores the
files of domains too), and what dag.policies says of a run's own policy is in actor_rollout_ref; changed code of a
reward function is reported."""


def flatten(config: Config) -> dict[str, object]:
    """The value of each key by its dotted name, in the order of the schema."""
    return {key: value for name in group_names() for key, _, value, _ in walk(find_group(config, name), name)}


def changed_from_default(values: Mapping[str, object], names: Iterable[str]) -> Iterator[str]:
    """Those of the keys whose value is not the default. values: of `flatten`."""
    keys = schema_keys()
    return (name for name in names if values[name] != keys[name].default)


def to_dict(config: Config) -> dict[str, object]:
    """Nested dicts, lists and scalars for JSON and YAML."""
    keys = [key for name in group_names() for key in walk(find_group(config, name), name)]
    return nested({name: spec.plain(value) for name, _, value, spec in keys})


def to_yaml(config: Config) -> str:
    """The whole config as YAML; loading it gives an equal config."""
    values = to_dict(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if text.replace("\n", "").isprintable():
        return text
    return yaml.safe_dump(values, sort_keys=False, width=120)  # escapes characters that control a terminal


def diff(before: Config, after: Config) -> list[tuple[str, object, object]]:
    old, new = flatten(before), flatten(after)
    return [(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]


def changed_keys(before: Config, after: Config) -> list[tuple[str, object, object]]:
    """The same without the keys that may change on resume, and without the files of domains."""
    old, new = (
        {name: replace(own, train_files=(), val_files=()) for name, own in config.data.domains.items()}
        for config in (before, after)
    )
    resumable = RESUMABLE | {"data.domains"} if old == new else RESUMABLE
    return [change for change in diff(before, after) if change[0] not in resumable]


def show_value(info: KeyInfo, value: object) -> str:
    return show(info.spec.plain(value))
