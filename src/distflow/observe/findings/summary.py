"""The sentences of the report: whether the run learned, what went wrong, where the time went."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from distflow.errors import count_of, joined
from distflow.observe.crash_safe_files import JSON
from distflow.observe.findings.finding import (
    ACCURACY,
    REWARD,
    Finding,
    Steps,
    known_values,
)
from distflow.observe.run_reader import Event, MetricsRecord, comparable_validations

_MAX_GROUPS = 200
_FEW_VALUES = 4
_SMALL_CHANGE = 0.02
"""Of an accuracy on an unknown number of problems."""
PROBLEM_KINDS = ("error", "warning", "finding")


class EventGroup(TypedDict):
    """Events of one kind with equal messages, in the page's form.

    first, last: their steps; None if the events had none. fields: of the last one. rolled_back:
    whether all are.
    """

    kind: str
    message: str
    count: int
    first: int | None
    fields: dict[str, JSON]
    last: int | None
    rolled_back: bool


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on validation problems over the run: (step, value) points.

    before_training: the first point was measured before any update. num_problems: None if unknown.
    changed_at: the first step if earlier ones were on other problems, and are left out.
    """

    points: tuple[tuple[int, float], ...]
    before_training: bool
    num_problems: int | None
    changed_at: int | None = None

    @property
    def best(self) -> tuple[int, float]:
        """The first step that reached the highest value."""
        return max(self.points, key=lambda point: (point[1], -point[0]))

    def noise(self) -> float | None:
        """Two standard errors of the change, assuming independent problems; None if their number is
        unknown."""
        ends = (self.points[0][1], self.points[-1][1])
        if not self.num_problems or not all(0 <= value <= 1 for value in ends):
            return None
        # One problem either way is within the noise, however certain the shares look.
        variance = sum(value * (1 - value) for value in ends) / self.num_problems
        return max(2 * math.sqrt(variance), 1 / self.num_problems)


def find_accuracy(
    records: Sequence[MetricsRecord], num_problems: int | None, events: Sequence[Event]
) -> Accuracy | None:
    """The overall accuracy on the last validation problems if the run measured it."""
    records, changed_at = comparable_validations(records, events)
    found: dict[int, float] = {}
    for record in records:
        value = record.values.get(ACCURACY, math.nan)
        if math.isfinite(value):
            found[record.step] = value

    points = tuple(sorted(found.items()))
    if not points:
        return None

    first_update = min((record.step for record in records if record.kind == "train"), default=None)
    first_step = points[0][0]
    before = first_step == 0 or (first_update is not None and first_step < first_update)
    return Accuracy(points, before, num_problems, changed_at)


def accuracies(
    records: Sequence[MetricsRecord], events: Sequence[Event]
) -> tuple[float | None, float | None]:
    """The accuracy before the first step and at the last validation after a step; None if not
    measured on the rows of the last validation."""
    found = find_accuracy(records, None, events)
    if found is None:
        return None, None
    (first_step, first), (last_step, last) = found.points[0], found.points[-1]
    return first if first_step == 0 else None, last if last_step > 0 else None


def describe_learning(accuracy: Accuracy | None, steps: Steps) -> Finding:
    """Whether the run learned, by validation accuracy if there is one, else by the reward, else by
    the loss."""
    if accuracy and len(accuracy.points) > 1:
        found = _learned_by_accuracy(accuracy)
        return found._replace(text=f"{found.text}{_of_other_rows(accuracy)}")

    if accuracy and accuracy.changed_at is not None:
        at, value = accuracy.points[-1]
        text = (
            f"Whether it learned cannot be said by validation: accuracy is {value:.2f} at step "
            f"{at}."
        )
        return Finding("unknown", f"{text}{_of_other_rows(accuracy)}")

    rewards = known_values(steps, REWARD)
    if len(rewards) >= _FEW_VALUES:
        return _learned_by_curve(rewards, "reward", 1, steps)

    for name in ("sft/loss", "rm/loss", "preference/loss", "loss"):
        losses = known_values(steps, name)
        if len(losses) >= _FEW_VALUES:
            return _learned_by_curve(losses, "loss", -1, steps)

    return Finding("unknown", "There are too few measurements to say whether it learned.")


def describe_accuracy(accuracy: Accuracy) -> Finding:
    """A finding on the accuracy before any training."""
    problems = "the validation problems"
    if accuracy.num_problems:
        problems = f"{accuracy.num_problems:,} validation problems"
    share = accuracy.points[-1][1]
    return Finding("flat", f"{share:.1%} of {problems} are solved; nothing was trained.")


def _of_other_rows(accuracy: Accuracy) -> str:
    if accuracy.changed_at is None:
        return ""
    return (
        f" The validation problems before step {accuracy.changed_at} were others, so their "
        "accuracies are not compared with later ones."
    )


def _learned_by_accuracy(accuracy: Accuracy) -> Finding:
    first_step, first = accuracy.points[0]
    last_step, last = accuracy.points[-1]
    noise = accuracy.noise()

    problems = ""
    if accuracy.num_problems:
        problems = f" ({accuracy.num_problems:,} problems)"

    start = "before RL"
    if not accuracy.before_training:
        start = f"at step {first_step}"

    moved = (
        f"accuracy on validation problems{problems} was {first:.2f} {start} and is {last:.2f} at "
        f"step {last_step}"
    )
    if noise is None and abs(last - first) <= _SMALL_CHANGE:
        return Finding("flat", f"No clear change: {moved}.")
    if noise is not None and abs(last - first) <= noise:
        change = f"the change of {last - first:+.2f} is within chance (±{noise:.2f})"
        return Finding("flat", f"No clear change: {moved}: {change}.")
    if last < first:
        return Finding("bad", f"It got worse: {moved}.")

    best_step, best = accuracy.best
    peak = ""
    if best - last > (noise or _SMALL_CHANGE):
        peak = f" It was best at step {best_step} with {best:.2f}."
    return Finding("good", f"It learned: {moved}.{peak}")


def _learned_by_curve(values: Sequence[float], word: str, sign: int, steps: Steps) -> Finding:
    """Compares the first and the last tenth of the steps (at least 2), relative to their spread."""
    size = min(max(len(values) // 10, 2), 50)
    first = values[:size]
    last = values[-size:]
    before = sum(first) / size
    after = sum(last) / size
    spread = sum((v - before) ** 2 for v in first) + sum((v - after) ** 2 for v in last)
    noise = 2 * math.sqrt(spread / max(2 * size - 2, 1) * 2 / size)
    moved = (
        f"the {word} was {before:.3g} over the first {size} steps and is {after:.3g} over the last "
        f"{size}"
    )
    caveat = ""
    names = set[str]().union(*steps.values())
    if word == "reward" and not any(name.startswith("val_correct/") for name in names):
        caveat = " Nothing was measured on validation problems."
    if abs(after - before) <= noise:
        return Finding("flat", f"No clear change: {moved}.{caveat}")
    if (after - before) * sign < 0:
        return Finding("bad", f"It got worse: {moved}.{caveat}")

    return Finding("good", f"The {word} {'rose' if sign > 0 else 'fell'}: {moved}.{caveat}")


def count_problems(groups: Sequence[EventGroup], steps: Steps) -> Finding:
    """Counts of problems. groups: of `group_events`."""
    numbers = dict.fromkeys(PROBLEM_KINDS, 0)
    for group in groups:
        numbers[group["kind"]] += group["count"]
    numbers["skipped update"] = round(sum(known_values(steps, "actor/skipped")))
    counts = [count_of(number, name) for name, number in numbers.items() if number]
    odd = set[str]()
    for values in steps.values():
        odd.update(name for name, value in values.items() if not math.isfinite(value))

    if odd:
        others = " and others" if len(odd) > 3 else ""
        counts.append(f"non-finite values in {', '.join(sorted(odd)[:3])}{others}")

    if not counts:
        return Finding("good", "The run recorded no warnings, errors or skipped updates.")
    return Finding("bad" if numbers["error"] else "flat", f"Worth a look: {joined(counts)}.")


def checked(events: Sequence[Event]) -> list[Mapping[str, JSON]]:
    """What was checked whole, with the step, without rolled-back steps."""
    return [
        {"step": event.step, **event.fields}
        for event in events
        if event.kind == "checks" and not event.rolled_back
    ]


def describe_checks(events: Sequence[Event]) -> Finding:
    """How many steps were checked whole, and what could not be checked, with the reason. A failed
    check would have ended the run. Which checks passed is in the events."""
    found = checked(events)
    if not found:
        text = (
            "No step was checked whole: trust.check_freq is 0, or the run ended before its first "
            "step."
        )
        return Finding("flat", text)

    passed = set[str]()
    unchecked: dict[str, JSON] = {}
    for fields in found:
        own = fields.get("passed")
        if isinstance(own, list):
            passed.update(map(str, own))
        reasons = fields.get("not_checked")
        if isinstance(reasons, dict):
            unchecked.update(reasons)

    num_steps = sum(fields.get("of") != "validation" for fields in found)
    text = (
        f"{count_of(num_steps, 'step')} {'was' if num_steps == 1 else 'were'} checked whole, "
        f"against the recorded data: {count_of(len(passed), 'check')} passed."
    )
    if unchecked:
        shown = "; ".join(f"{name} ({reason})" for name, reason in unchecked.items())
        text += f" Not checked, or not in every step: {shown}."

    return Finding("flat" if unchecked else "good", text)


def group_events(events: Sequence[Event]) -> list[EventGroup]:
    """Warnings, errors and findings, grouped by message; errors first, then by number."""
    equal: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind in PROBLEM_KINDS:
            equal.setdefault((event.kind, event.message), []).append(event)

    groups: list[EventGroup] = []
    for (kind, message), found in equal.items():
        groups.append(
            {
                "kind": kind,
                "message": message,
                "count": len(found),
                "first": found[0].step,
                "last": found[-1].step,
                "fields": dict(found[-1].fields),
                "rolled_back": all(event.rolled_back for event in found),
            }
        )

    groups.sort(key=lambda group: (PROBLEM_KINDS.index(group["kind"]), -group["count"]))
    return groups[:_MAX_GROUPS]


NO_END = {"word": "no end yet", "detail": "the run is still in progress, or it was killed"}


def status(events: Sequence[Event]) -> dict[str, str]:
    """The run's status from its last start and end: a word, and a sentence if there is more to
    say."""
    ends = [event for event in events if event.kind in ("start", "end")]
    if not ends:
        return {"word": "unknown", "detail": "the folder has no start event"}
    if ends[-1].kind == "start":
        return NO_END
    return {"word": str(ends[-1].fields.get("status", "finished")), "detail": ends[-1].message}


def failure(events: Sequence[Event]) -> Event | None:
    """The error that ended the last start of a run; None if it did not fail."""
    starts = [i for i, event in enumerate(events) if event.kind == "start"]
    last = events[starts[-1] :] if starts else events
    errors = [event for event in last if event.kind == "error"]
    if status(events)["word"] != "failed" or not errors:
        return None
    return errors[-1]


def ending(events: Sequence[Event], steps: Steps, planned: JSON, written: float) -> Finding:
    """How the run ended; "" if it simply finished.

    planned: its steps; None if unknown. written: when it last recorded something, in seconds since
    the epoch.
    """
    done = max((step for step, values in steps.items() if "timing_s/step" in values), default=0)
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    after = "before its first step was done"
    if done:
        after = f"after {done:,}{of} step{'s' if done > 1 or of else ''}"
    word = status(events)["word"]
    if failed := failure(events):
        is_check = failed.fields.get("raised") == "TrustError"
        return Finding("bad", f"{'A check stopped it' if is_check else 'It failed'} {after}:")
    if word == "failed":
        return Finding("bad", f"It failed {after}.")
    if word == "stopped":
        return _stopped(events, after)

    if word == NO_END["word"]:
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        why = "it is still running, or it was killed"
        return Finding("flat", f"No end is recorded {after}: {why}. Its last record is of {last}.")

    reasons = [event.fields.get("why") for event in events if event.kind == "end"]
    if not reasons or not reasons[-1]:
        return Finding("good", "")
    return Finding("good", f"It ended {after}: {reasons[-1]}.")


def _stopped(events: Sequence[Event], after: str) -> Finding:
    by = ""
    then = "no checkpoint was saved, so the same command starts from the beginning"
    for event in events:
        if signal := re.match(r"(SIG[A-Z]+): ", event.message):
            by = f" by {signal[1]}"
        if event.kind == "checkpoint" and not event.rolled_back:
            then = f"the same command resumes from step {event.step}"

    return Finding("flat", f"It was stopped{by} {after}; {then}.")
