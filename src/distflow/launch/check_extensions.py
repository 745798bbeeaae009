"""Checks the parts that a run chooses by name, before a model is built: each must be where its
table, or the config, says, and have what its kind requires."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distflow import builtin_names as names
from distflow.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    Registry,
)
from distflow.builtin_names import CUSTOM_REWARD, Entry
from distflow.config import Config
from distflow.config.derived_settings import (
    PREFERENCE_LOSS,
    is_rl,
    named_algorithms,
    named_rewards,
    pipeline_name,
)
from distflow.errors import MissingColumn, UserError, hint
from distflow.graph.fields import STANDARD_FIELDS
from distflow.import_target import SourceFile, load, shown_name, split_name
from distflow.observe.writing.trackers import Tracker
from distflow.rewards.function_loading import custom_target, find_fault
from distflow.rollout.engine import RolloutEngine
from distflow.training.engine import TrainEngine

TABLES: dict[str, Mapping[str, Entry]] = {
    "pipeline": names.PIPELINES,
    "advantage estimator": names.ESTIMATORS,
    "policy loss": names.POLICY_LOSSES,
    "preference loss": names.PREFERENCE_LOSSES,
    "reward function": names.REWARDS,
    "rollout engine": names.ROLLOUT_ENGINES,
    "train engine": names.TRAIN_ENGINES,
    "tracker": names.TRACKERS,
}
"""The built-in parts of each kind."""
_REGISTRIES: dict[str, Registry[Any]] = {
    "advantage estimator": ADV_ESTIMATORS,
    "policy loss": POLICY_LOSSES,
    "preference loss": PREFERENCE_LOSSES,
}
_PROTOCOLS: dict[str, type] = {
    "rollout engine": RolloutEngine,
    "train engine": TrainEngine,
    "tracker": Tracker,
}


@dataclass(frozen=True)
class Part:
    """A chosen part."""

    kind: str
    """One of `TABLES`."""
    key: str
    """The key that chooses it."""
    name: str
    target: str
    """"module:attribute" or "file.py:attribute"."""


def check_extensions(config: Config) -> None:
    """Raises UserError for chosen parts that do not exist, or cannot be called."""
    faults = []
    for part in chosen_parts(config):
        for fault in faults_of(part):
            faults.append(f"{part.key}: {part.kind} '{part.name}': {fault}")
    if faults:
        raise UserError("\n".join(faults))


def chosen_parts(config: Config) -> Iterator[Part]:
    """All parts that a config chooses, except names that an imported user module registers."""
    custom = config.custom_reward_function
    for kind, key, name in _choices(config):
        entry = TABLES[kind].get(name)
        target = ""
        if kind == "reward function" and name == CUSTOM_REWARD:
            if custom.path:
                target = custom_target(custom.path, custom.name)
        elif entry is not None:
            target = entry.target
        elif ":" in name:
            target = custom_target(*split_name(name))

        if target:
            yield Part(kind, key, name, target)


def _choices(config: Config) -> Iterator[tuple[str, str, str]]:
    """The kind, key and name of each choice."""
    settings = config.actor_rollout_ref
    yield "pipeline", "dag.pipeline", pipeline_name(config)
    yield "train engine", "actor_rollout_ref.actor.strategy", settings.actor.strategy
    for name in config.trainer.logger:
        yield "tracker", "trainer.logger", name
    for key, name in named_algorithms(config):
        kind = "advantage estimator"
        if key.endswith("policy_loss"):
            kind = "policy loss"
        elif key == PREFERENCE_LOSS:
            kind = "preference loss"
        yield kind, key, name

    if not is_rl(config):
        return

    yield "rollout engine", "actor_rollout_ref.rollout.name", settings.rollout.name
    for key, _, parts in named_rewards(config):
        for part in parts:
            yield "reward function", key, part.name


def faults_of(part: Part) -> Iterator[str]:
    """The reasons why the part cannot work."""
    module, attribute = split_name(part.target)

    # Reward functions are imported by their own processes alone; the package of a tracker may be
    # missing, which the run reports.
    if part.kind in ("reward function", "tracker"):
        source = SourceFile.of(module)
        if source is None:
            return  # importing it will report why it cannot be read

        if not source.defines(attribute.partition(".")[0]):
            yield f"{module} has no '{attribute}'{hint(attribute, source.names)}"
        elif part.kind == "tracker":
            yield from _lacking(part, source.methods(attribute).__contains__)
        elif (signature := source.signature(attribute)) and (fault := find_fault(signature)):
            yield f"{module}: {attribute} {fault}"

        return

    try:
        made = load(part.target)
        registry = _REGISTRIES.get(part.kind)
        is_registered = registry is None or registry.known(part.name) is not None
    except ValueError as error:  # including a registry's error for a function that it cannot call
        yield str(error)
        return

    if not is_registered:
        yield f"{module} does not register '{part.name}': add the decorator above {attribute}"

    # mypy has checked our own parts, of which an engine behind servers becomes one in a `Fleet`
    is_ours = module.startswith("distflow.")
    if part.kind in _PROTOCOLS and not is_ours:
        yield from _lacking(part, lambda name: callable(getattr(made, name, None)))


def _lacking(part: Part, has: Callable[[str], bool]) -> Iterator[str]:
    """A message with all methods of its protocol that a class lacks."""
    protocol = _PROTOCOLS[part.kind]
    missing = []
    for name, member in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_") and not has(name):
            missing.append(f"{name}{inspect.signature(member)}")

    if missing:
        lines = "".join(f"\n  {line}" for line in missing)
        yield f"{part.target} lacks methods of {protocol.__module__}. Add{lines}"


def explain_missing_column(error: MissingColumn, config: Config) -> UserError | None:
    """The error for a column that no node can write, as an estimator or a loss has a parameter that
    is not a column."""
    for kind, key, name in _choices(config):
        known = _REGISTRIES[kind].get(name) if kind in _REGISTRIES else None
        if known is not None and error.column in inspect.signature(known.fn).parameters:
            function = getattr(known.fn, "__qualname__", name)
            meant = hint(error.column, STANDARD_FIELDS)
            end = "" if meant.endswith("?") else "."
            return UserError(
                f"{key}: {kind} '{name}' ({shown_name(known.fn)}) takes '{error.column}', not a "
                f"column of the batch{meant}{end} If it is an option, put it after a *: def "
                f"{function}(..., *, {error.column}=...)"
            )

    return None
