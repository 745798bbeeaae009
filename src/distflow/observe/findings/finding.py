"""A finding on a run, and what its rules share: values of steps, the config, words for numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from distflow.builtin_names import WORKFLOWS, WorkflowEntry
from distflow.errors import count_of
from distflow.import_target import load_function
from distflow.observe.crash_safe_files import JSON

Tone = Literal["good", "bad", "flat", "unknown"]
Steps = Mapping[int, Mapping[str, float]]
"""The metrics of each step by name."""

Config = Mapping[str, JSON]

ACCURACY = "val_correct/all/mean"
REWARD = "reward/mean_score"
MANY_STEPS = 8
"""Steps before which nothing is judged, and that the rules over a window see."""


class Finding(NamedTuple):
    """A sentence on a run, of a rule or of the summary."""

    tone: Tone

    text: str

    advice: str = ""
    """What to do about it."""

    hinders: bool = False
    """Whether it prevented the run from learning."""

    rule: str = ""
    """The name of the doctor's rule; empty for a sentence of the summary."""

    level: str = ""
    """ "error", "warning", or "" for no problem."""

    action: str = ""
    """A "key=value" to try."""

    first: int | None = None
    """The first bad step."""

    last: int | None = None
    """The last bad step."""

    is_over: bool = False
    """Whether good steps followed."""

    numbers: Mapping[str, float] = {}
    """Where to see it: metrics,"""

    uids: tuple[str, ...] = ()
    """and samples."""


def setting(config: Config, key: str) -> JSON:
    """The value of a dotted key; None if unknown."""
    value: JSON | Config = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if not isinstance(value, Mapping) else None


def workflow_of(config: Config) -> WorkflowEntry | None:
    """The run's built-in workflow, if it has one."""
    return WORKFLOWS.get(str(setting(config, "actor_rollout_ref.rollout.workflow")))


def draws_numbers(config: Config) -> bool:
    """Whether the policy draws numbers. The entropy of their normal distribution passes through
    0."""
    workflow = workflow_of(config)
    options: object = config
    for name in ("actor_rollout_ref", "rollout", "workflow_kwargs"):
        options = options.get(name) if isinstance(options, Mapping) else None

    if workflow is None or not workflow.draws_numbers or not isinstance(options, Mapping):
        return False
    return bool(load_function(workflow.draws_numbers)(options))


def known_values(steps: Steps, name: str) -> list[float]:
    """A metric's finite values in the order of the steps."""
    found = []
    for _, values in sorted(steps.items()):
        value = values.get(name, math.nan)
        if math.isfinite(value):
            found.append(value)
    return found


def mean(values: Sequence[float]) -> float:
    """NaN without values."""
    return sum(values) / len(values) if values else math.nan


def last_quarter(values: Sequence[float]) -> Sequence[float]:
    """At least one value."""
    return values[-max(len(values) // 4, 1) :]


def late_mean(steps: Steps, name: str) -> float:
    """A metric's mean over the last quarter of the steps that have it; NaN if none has."""
    return mean(last_quarter(known_values(steps, name)))


def over_last_quarter(number: int) -> str:
    """In words, for so many values."""
    quarter = max(number // 4, 1)
    if quarter > 1:
        return f"over the last {count_of(quarter, 'step')}"
    return "in the last step"


def steps_with(steps: Steps, metric: str) -> str:
    """The steps with the metric in words: all of a run, or the last ones of a run in progress."""
    known = sorted(step for step, values in steps.items() if metric in values)
    if len(known) > 1 and known[0] > 1:
        return f"steps {known[0]:,} to {known[-1]:,}"
    return f"{'all ' if len(known) > 1 else ''}{count_of(len(known), 'step')}"


def since_step(steps: Steps, name: str, limit: float) -> int | None:
    """The step since which the metric has reached its limit in each step that has it."""
    since = None
    for step, values in sorted(steps.items()):
        if values.get(name, limit) < limit:
            since = None
        elif since is None:
            since = step

    return since


def readable_s(seconds: float) -> str:
    """`8.2 s`, `4 min 12 s`, `3 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
