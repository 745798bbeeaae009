"""Checks the parts that a run chooses by name, before a model is built: each must be where its
table says, and have what its kind requires. Messages say what is missing, in which file, and what
to write there.

`config/extension_registries.py` finds files that no table names.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distflow import builtin_names as names
from distflow.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    AdvEstimator,
    PolicyLoss,
    Registry,
)
from distflow.builtin_names import CUSTOM_REWARD, Entry, Reward
from distflow.config import Config
from distflow.config.derived_settings import is_rl, named_algorithms, named_rewards, pipeline_name
from distflow.config.extension_registries import EXTENSION_POINTS
from distflow.config.keys.rollout import RolloutConfig
from distflow.errors import MissingColumn, UserError, hint
from distflow.graph.fields import STANDARD_FIELDS
from distflow.import_target import SourceFile, load, shown_name, split_name
from distflow.observe.writing.trackers import Tracker
from distflow.rewards.function_loading import custom_target, find_fault
from distflow.rollout.engine import RolloutEngine
from distflow.training.engine import TrainEngine
from distflow.training.torch_engine import ScorerOptions


@dataclass(frozen=True)
class Part:
    """A chosen part. key: that chooses it. target: "module:attribute". entry: of its table; None
    for a user's function."""

    key: str
    name: str
    target: str
    entry: Entry | None

    @property
    def file(self) -> str:
        """The file for messages, relative to the package if it is there."""
        module = split_name(self.target)[0]
        return (
            module
            if module.endswith(".py")
            else f"{module.removeprefix('distflow.').replace('.', '/')}.py"
        )

    @property
    def attribute(self) -> str:
        return split_name(self.target)[1]


Says = Callable[[Part], Iterable[str]]


@dataclass(frozen=True)
class Kind:
    """A kind of part, by its name in `EXTENSION_POINTS`. faults: why a part cannot work.
    is_imported: whether its module may be imported here, before `faults`."""

    name: str
    faults: Says = lambda part: ()
    is_imported: bool = True

    @property
    def table(self) -> str:
        return next(point.table for point in EXTENSION_POINTS if point.kind == self.name)

    @property
    def entries(self) -> Mapping[str, Entry]:
        entries: Mapping[str, Entry] = vars(names)[self.table]
        return entries


def check_extensions(config: Config) -> None:
    """Raises UserError for chosen parts that are only partly registered, or cannot be called."""
    if faults := [fault for kind, part in chosen_parts(config) for fault in faults_of(kind, part)]:
        raise UserError("\n".join(faults))


def faults_of(kind: Kind, part: Part) -> list[str]:
    """The reasons why the part cannot work, each as a whole message."""
    registered = f" ({kind.table} in builtin_names.toml)" if part.entry is not None else ""
    try:
        if kind.is_imported:
            load(part.target)
        faults = list(kind.faults(part))
    except ValueError as error:  # including a registry's error for a function that it cannot call
        faults = [
            f"its entry names '{part.target}': {error}" if part.entry is not None else str(error)
        ]
    named = f"{kind.name} '{part.name}'"  # with which some faults begin
    return [
        f"{part.key}: {fault if fault.startswith(named) else f'{named}{registered}: {fault}'}"
        for fault in faults
    ]


def chosen_parts(config: Config) -> Iterator[tuple[Kind, Part]]:
    """All parts that a config chooses, except names that an imported user module registers."""
    custom = config.custom_reward_function
    for kind, key, name in _choices(config):
        entry = kind.entries.get(name)
        target = (
            entry.target
            if entry is not None
            else custom_target(*split_name(name))
            if ":" in name
            else ""
        )
        if kind is REWARD and name == CUSTOM_REWARD:
            entry = None
            target = custom_target(custom.path, custom.name) if custom.path else ""
        if target:
            yield kind, Part(key, name, target, entry)


def _choices(config: Config) -> Iterator[tuple[Kind, str, str]]:
    """The kind, key and name of each choice."""
    settings = config.actor_rollout_ref
    yield PIPELINE, "dag.pipeline", pipeline_name(config)
    yield TRAIN_ENGINE, "actor_rollout_ref.actor.strategy", settings.actor.strategy
    yield from ((TRACKER, "trainer.logger", name) for name in config.trainer.logger)
    if not is_rl(config):
        return
    yield ROLLOUT_ENGINE, "actor_rollout_ref.rollout.name", settings.rollout.name
    named = named_algorithms(config)
    yield from (
        (LOSS if key.endswith("policy_loss") else ESTIMATOR, key, name) for key, name in named
    )
    for key, _, parts in named_rewards(config):
        yield from ((REWARD, key, part.name) for part in parts)


def explain_missing_column(error: MissingColumn, config: Config) -> UserError | None:
    """The error for a column that no node can write, as an estimator or a loss has a parameter that
    is not a column."""
    registries: dict[str, Mapping[str, AdvEstimator | PolicyLoss]]
    registries = {ESTIMATOR.name: ADV_ESTIMATORS, LOSS.name: POLICY_LOSSES}
    for kind, key, name in _choices(config):
        known = registries.get(kind.name, {}).get(name)
        if known is not None and error.column in inspect.signature(known.fn).parameters:
            function = getattr(known.fn, "__qualname__", name)
            shown = shown_name(known.fn)
            meant = f"column of the batch{hint(error.column, STANDARD_FIELDS)}".removesuffix("?")
            return UserError(
                f"{key}: {kind.name} '{name}'{'' if shown == name else f' ({shown})'} takes "
                f"'{error.column}', not a "
                f"{meant}. If it is an option, put it after a *: "
                f"def {function}(..., *, {error.column}=...)"
            )
    return None


def _is_registered(registry: Registry[Any], decorator: str) -> Says:
    def faults(part: Part) -> Iterator[str]:
        if registry.known(part.name) is None:
            yield (
                f'{part.file} does not register it: add @{decorator}("{part.name}") above '
                f"{part.attribute}"
            )

    return faults


def _scores(part: Part) -> Iterator[str]:
    """Faults of a reward function, read from the file's text: it is not imported into this
    process."""
    module = split_name(part.target)[0]
    source = SourceFile.of(module)
    if source is None:
        return  # importing it will report why it cannot be read
    if not source.defines(part.attribute.partition(".")[0]):
        yield f"{part.file} has no '{part.attribute}'{hint(part.attribute, source.names)}"
    elif (signature := source.signature(part.attribute)) and (fault := find_fault(signature)):
        yield f"{part.file}: {part.attribute} {fault}"
    if not isinstance(part.entry, Reward):
        return
    if not source.defines("CASES"):
        yield (
            f"{part.file} has no CASES, which are scored before a run starts: add below its "
            "imports "
            'CASES = (Case("a response", "its ground truth", 1.0), ...) with scores that are known '
            "(Case is in "
            "rewards/reward_results.py), or CASES = () if the function calls a service"
        )
    for target in filter(None, (part.entry.row_check, part.entry.prepare)):
        own, attribute = split_name(target)
        found = SourceFile.of(own)
        if found is None or not found.defines(attribute):
            yield (
                f"its entry names {target}, which does not exist: add it, or remove it from the "
                "entry"
            )


def _has_methods(
    protocol: type, file: str, positional: int = 0, keywords: tuple[str, ...] = ()
) -> Says:
    """positional, keywords: the arguments of its constructor; a rollout engine also takes keys of
    its group."""

    def faults(part: Part) -> Iterator[str]:
        made = load(part.target)
        assert callable(made), "a table of classes"
        yield from _lacking(part, protocol, file, lambda name: callable(getattr(made, name, None)))
        parameters = inspect.signature(made).parameters.values()
        own = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} & set(dir(RolloutConfig))
        try:
            inspect.signature(made).bind(*[None] * positional, **dict.fromkeys({*keywords, *own}))
        except TypeError as error:
            yield (
                f"{part.file}: {part.attribute} cannot be created: {error}. It is called with "
                f"{positional} by position"
                f"{', ' * bool(keywords)}{', '.join(f'{name}=' for name in keywords)}"
            )

    return faults


def _tracks(part: Part) -> Iterator[str]:
    """Faults of a tracker, read from its file's text: its package may be missing, which a run
    reports."""
    source = SourceFile.of(split_name(part.target)[0])
    if source is None or not source.defines(part.attribute):
        yield f"{part.file} has no class {part.attribute}: add it, or correct the entry"
        return
    own = source.methods(part.attribute)
    yield from _lacking(part, Tracker, "observe/writing/trackers.py", own.__contains__)


def _lacking(part: Part, protocol: type, file: str, has: Callable[[str], bool]) -> Iterator[str]:
    """One message with all protocol methods that a class lacks. file: of the protocol."""
    if missing := [name for name in _methods(protocol) if not has(name)]:
        lines = "".join(f"\n  {_declared(getattr(protocol, name))}" for name in missing)
        yield f"{part.file}: {part.attribute} lacks methods that {file} describes. Add{lines}"


def _methods(protocol: type) -> list[str]:
    """Methods of a protocol and of those that it extends; properties may be attributes of the
    instance."""
    named = {
        name: member for base in reversed(protocol.__mro__) for name, member in vars(base).items()
    }
    own = {
        name
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False)
        for name in vars(base)
    }
    return [
        name
        for name, member in named.items()
        if name in own
        and inspect.isfunction(member)
        and (name[0] != "_" or name in ("__aenter__", "__aexit__"))
    ]


def _declared(method: Callable[..., object]) -> str:
    """The first line of the method, with only the names of types."""
    signature = re.sub(r"(?:[A-Za-z_]+[.])+([A-Za-z_]+)", r"\1", str(inspect.signature(method)))
    return f"{'async ' * inspect.iscoroutinefunction(method)}def {method.__name__}{signature}"


_TRAIN_ARGUMENTS = (
    *("optimizer", "schedule", "group"),
    *ScorerOptions.__annotations__,
    *("max_grad_norm", "gradient_checkpointing"),
)

PIPELINE = Kind("pipeline")
ESTIMATOR = Kind(
    "advantage estimator",
    _is_registered(ADV_ESTIMATORS, "register_adv_est"),
)
LOSS = Kind(
    "policy loss",
    _is_registered(POLICY_LOSSES, "register_policy_loss"),
)
REWARD = Kind("reward function", _scores, is_imported=False)
ROLLOUT_ENGINE = Kind(
    "rollout engine",
    _has_methods(RolloutEngine, "rollout/engine.py", 2, ("version", "shares_weights")),
)
TRAIN_ENGINE = Kind(
    "train engine", _has_methods(TrainEngine, "training/engine.py", 1, _TRAIN_ARGUMENTS)
)
TRACKER = Kind("tracker", _tracks, is_imported=False)
KINDS = (PIPELINE, ESTIMATOR, LOSS, REWARD, ROLLOUT_ENGINE, TRAIN_ENGINE, TRACKER)
