"""Rules over the whole of a run: its samples, its ledger, its spans and its plan."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from distflow.errors import joined
from distflow.observe.findings.finding import (
    MANY_STEPS,
    Finding,
    known_values,
)
from distflow.observe.run_reader import sample_splits
from distflow.observe.run_records import RunRecords
from distflow.observe.writing.timing import DATA, ENGINE, RANKS, REWARDS

MAX_SHOWN = 300
MAX_UIDS = 5
_MUCH_IDLE = 0.2
"""The share of the last steps above which idleness is reported."""
_LAST_STEPS = 20
_SHORT_S = 0.5
"""Steps that are shorter are mostly overhead."""
_MAX_FILES = 10
_MAX_NAMED = 5
_SOME_ERRORS = 0.02
_BAD_ERRORS = 0.05
_MANY_ERRORS = 0.1
_ADVICE_BY_CAUSE = {
    REWARDS: (
        "Give the reward functions more processes (reward.num_workers), or a shorter "
        "reward.timeout_s."
    ),
    ENGINE: (
        "Generation is the slower side: give it more devices, or fewer and shorter responses, or "
        "raise async.max_staleness."
    ),
    DATA: "Rows are made too slowly: set data.lazy=false, or prepare the data beforehand.",
    RANKS: (
        "One rank is slower than the others: look at its machine, and at the sizes of its share."
    ),
    "tool ": "Episodes wait for their tools: make these faster, or run more groups.",
    "environment": "Episodes wait for their environment: make it faster, or run more groups.",
    "training": "Training is the slower side: give it more devices, or lower async.max_staleness.",
    "coordinator": (
        "Training is the slower side: give it more devices, or lower async.max_staleness."
    ),
}
"""What to do by the beginning of what idle workers waited for."""


def reward_errors(run: RunRecords) -> Finding | None:
    """Responses with reward errors, with the most frequent messages."""
    errors: dict[int, float] = {}
    validation: dict[int, float] = {}
    for step, values in run.steps.items():
        if number := _failed(values):
            errors[step] = number
        if number := _finite(values.get("val/errors", 0.0)):
            validation[step] = number

    if not errors and not validation:
        return None

    num_calls = sum(known_values(run.steps, "reward/calls"))
    num_failed = sum(errors.values())

    share = float(bool(errors))
    of = ""
    if num_calls:
        share = num_failed / num_calls
        of = f" of {num_calls:,.0f}"

    where = []
    if errors:
        where.append(f"on {num_failed:,.0f}{of} responses in training, which are left out")

    if validation:
        number = sum(validation.values())
        where.append(f"on {number:,.0f} validation responses, which count as wrong")

    level = ""
    if share > _MANY_ERRORS:
        level = "error"
    elif share > _SOME_ERRORS or validation:
        level = "warning"

    first = min(errors, default=None)
    failed = list[str]()
    if first is not None:
        failed = [str(row.get("uid")) for row in run.samples(first) if row.get("errors")]

    return Finding(
        "bad" if share > _BAD_ERRORS or validation else "flat",
        f"The reward function failed {joined(where)}.{_most_frequent(run, errors, validation)}",
        rule="reward-errors",
        level=level,
        first=first,
        numbers={"reward/error_rate": share},
        uids=tuple(failed[:MAX_UIDS]),
    )


def _most_frequent(run: RunRecords, errors: Iterable[int], validation: Iterable[int]) -> str:
    """A sentence on the most frequent message, of the steps with errors; empty without one."""
    messages = Counter(_messages(run, "train", errors))
    for split in sample_splits(run.run_dir):
        if split != "train":
            messages.update(_messages(run, split, validation))

    for message, number in messages.most_common(1):
        return f" It said “{message}” ({number:,} times in the samples)."
    return ""


def _messages(run: RunRecords, split: str, steps: Iterable[int]) -> Iterator[str]:
    for step in sorted(steps)[:_MAX_FILES]:
        for row in run.samples(step, split):
            errors = row.get("errors")
            for error in errors if isinstance(errors, list) else [errors]:
                if isinstance(error, str) and error:
                    yield error if len(error) <= MAX_SHOWN else f"{error[:MAX_SHOWN]}…"


def _failed(values: Mapping[str, float]) -> float:
    """Reward errors of a step, including those on dropped groups if they were recorded."""
    if "reward/error_rate" in values:
        return round(_finite(values["reward/error_rate"] * values.get("reward/calls", 0.0)))
    return _finite(values.get("reward/errors", 0.0)) + _finite(values.get("reward/timeouts", 0.0))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def idle_workers(run: RunRecords) -> Finding | None:
    """Workers that do nothing for more than a fifth of the last steps."""
    last = list(run.times.windows)[-_LAST_STEPS:]
    share = run.times.idle_share(last) or 0.0
    is_short = run.times.seconds(last) < _SHORT_S * len(last) * run.times.workers
    if share <= _MUCH_IDLE or len(last) < MANY_STEPS or is_short:
        return None

    seconds: dict[str, float] = {}
    for (step, cause), idle in run.times.idle_causes.items():
        if step in last:
            seconds[cause] = seconds.get(cause, 0.0) + idle

    total = run.times.seconds(last)
    longest_first = sorted(seconds.items(), key=lambda each: -each[1])
    shares = {cause: idle / total for cause, idle in longest_first[:_MAX_NAMED]}

    named = [f"{cause} {part:.0%}" for cause, part in shares.items() if part >= 0.01]
    waited = ""
    if named:
        waited = f", while something waited for {joined(named)}"

    text = f"Workers were idle in {share:.0%} of the time of the last {len(last)} steps{waited}."
    longest = next(iter(shares), "")
    advice = next(
        (text for start, text in _ADVICE_BY_CAUSE.items() if longest.startswith(start)), ""
    )
    numbers = {"idle": share, **shares}

    return Finding("flat", text, advice, rule="idle-workers", level="warning", numbers=numbers)
