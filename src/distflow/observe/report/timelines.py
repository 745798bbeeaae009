"""Timelines of steps: the activities and waits of rollout and training loop, in lanes."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from distflow.observe.report.activity import RunActivity
from distflow.observe.run_reader import MetricsRecord
from distflow.observe.writing.run_folder import Span

MAX_SPANS = 300
MAX_STEPS = 10
_LEAST_SHARE = 0.0005

Bar = tuple[float, float, str, int | None, float | None]
"""Start and end in seconds since the window began, and a description. For a group, its staleness
when trained on, and when that was; for decoding, the version of the weights; else None."""


StepTimeline = dict[str, Any]
"""first, last: its steps. why: the reason to show them. lanes: of bars, with the kind of their
spans. steps, synced: when each step ended, and when weights were synced, with the step's number.
paused: when validations ran. notes: sentences on it."""


class _Step(NamedTuple):
    number: int
    start: float
    end: float
    restart: int


def timelines(activity: RunActivity, records: Sequence[MetricsRecord]) -> list[StepTimeline]:
    """Timelines of the last steps together, of a typical step, the slowest and the last; empty if
    nothing was timed.

    records: the surviving ones.
    """
    steps = _timed(activity, records)
    if not steps:
        return []
    by_length = sorted(steps, key=lambda step: step.end - step.start)
    chosen: dict[tuple[int, int], tuple[str, list[_Step]]] = {}
    for why, part in (
        ("the last steps", _last(activity, steps)),
        ("a usual step", [by_length[len(by_length) // 2]]),
        ("the slowest step", [by_length[-1]]),
        ("the last step", [steps[-1]]),
    ):
        if part:
            chosen.setdefault((part[0].number, part[-1].number), (why, part))
    found = [_timeline(activity, why, part) for why, part in chosen.values()]
    return [line for line in found if line["lanes"]]


def timelines_of(
    activity: RunActivity, records: Sequence[MetricsRecord], number: int
) -> list[StepTimeline]:
    """The timeline of one step; empty if it was not timed."""
    found = [
        _timeline(activity, "this step", [step])
        for step in _timed(activity, records)
        if step.number == number
    ]
    return [line for line in found if line["lanes"]]


def _timed(activity: RunActivity, records: Sequence[MetricsRecord]) -> list[_Step]:
    starts = [span.start for part in activity.spans.values() for span in part]
    earliest = min(starts, default=inf)
    steps: list[_Step] = []
    is_first = True
    for record in records:
        seconds = record.values.get("timing_s/step", 0.0)
        if seconds <= 0:
            continue
        # There is nothing to draw for a step whose spans were lost; the first one begins with a
        # start that has none.
        least = record.t - (0.0 if is_first else seconds / 2)
        is_first = False
        if least >= earliest:
            steps.append(_Step(record.step, record.t - seconds, record.t, record.restart))
    return steps


def _last(activity: RunActivity, steps: Sequence[_Step]) -> list[_Step]:
    """The last steps since the last resume, as many as have drawable groups, at least two and at
    most `MAX_STEPS`."""
    part = [step for step in steps if step.restart == steps[-1].restart][-MAX_STEPS:]
    starts = []
    for spans in activity.spans.values():
        for span in spans:
            if span.kind == "group":
                starts.append(span.start)
    while (
        len(part) > 2 and sum(part[0].start <= start < part[-1].end for start in starts) > MAX_SPANS
    ):
        part = part[1:]
    return part if len(part) > 1 else []


def _timeline(activity: RunActivity, why: str, part: Sequence[_Step]) -> StepTimeline:
    start = part[0].start
    end = part[-1].end
    training = [
        span for span in activity.spans.get("training", ()) if start < span.end and span.start < end
    ]
    lanes, notes = _lanes(activity, start, end)
    if any(span.kind == "decode" for part in activity.spans.values() for span in part):
        waited = activity.waited(start, end) / (end - start)
        decoded = activity.decoded(start, end) / (end - start)
        shares = (
            f"The trainer waited for groups {waited:.0%} of this time; the engine decoded "
            f"{decoded:.0%} of it."
        )
        notes = [shares, *notes]
    return {
        "first": part[0].number,
        "last": part[-1].number,
        "why": why,
        "seconds": round(end - start, 4),
        "lanes": lanes,
        "steps": [(round(step.end - start, 4), step.number) for step in part[:-1]],
        "synced": [
            (round(span.end - start, 4), span.step)
            for span in training
            if span.what == "update_weights" and span.step is not None and span.end <= end
        ],
        "paused": [
            (round(max(span.start, start) - start, 4), round(min(span.end, end) - start, 4))
            for span in training
            if span.what == "eval"
        ],
        "notes": notes,
    }


def _lanes(
    activity: RunActivity, start: float, end: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """The lanes, and sentences on spans that are not drawn."""
    lanes = []
    left_out = 0
    notes = []
    training = activity.spans.get("training", ())
    is_given = any(span.what == "data" and span.kind == "phase" for span in training)
    for actor, spans in activity.spans.items():
        shown = "data" if is_given and actor == "rollout" else actor
        for (kind, name), own in by_lane(shown, spans).items():
            inside = [span for span in own if _until(activity, span) > start and span.start < end]
            if kind == "wait":
                inside = _idle(inside, spans)
            if kind == "group":
                drawn, every = _sampled(inside)
                if every > 1:
                    notes.append(f"One group of {every} is drawn.")
            else:
                drawn = _longest(inside, _LEAST_SHARE * (end - start))
                left_out += len(inside) - len(drawn)
            bars = [_bar(activity, span, start, end) for span in drawn]
            if bars:
                lanes.append({"name": name, "kind": kind, "spans": bars})
    order = {"phase": 0, "group": 1, "decode": 2, "wait": 3}
    lanes.sort(key=lambda lane: order.get(str(lane["kind"]), 1))
    if left_out:
        spans_are = "spans are" if left_out > 1 else "span is"
        notes.append(f"{left_out} {spans_are} not shown (too short or too many).")
    return lanes, notes


def by_lane(actor: str, spans: Sequence[Span]) -> Mapping[tuple[str, str], list[Span]]:
    names = {"phase": actor, "wait": f"{actor} waits for"}
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.kind == "decode":
            name = f"{actor} decodes: {span.what}"
        else:
            name = names.get(span.kind, f"{actor}: {span.kind}s")
        lanes.setdefault((span.kind, name), []).append(span)
    return lanes


def _idle(waits: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """The waits in which no group of the actor ran all the time; otherwise it only waited to start
    another one."""
    groups = sorted((span.start, span.end) for span in spans if span.kind == "group")
    # of those that began so far, the last one
    ends = [-inf, *accumulate((end for _, end in groups), max)]
    return [wait for wait in waits if ends[bisect_right(groups, (wait.start, inf))] < wait.end]


def _sampled(groups: Sequence[Span]) -> tuple[list[Span], int]:
    """Every n-th group, so that they can be drawn."""
    every = -(-len(groups) // MAX_SPANS) or 1
    in_order = sorted(
        groups, key=lambda span: (span.start, -1 if span.group_id is None else span.group_id)
    )
    return in_order[::every], every


def _longest(spans: Sequence[Span], least_s: float) -> list[Span]:
    """Spans that are long enough to be visible, by start; on a tie the longer one first, so that a
    span within another is drawn on top of it."""
    seen = sorted(
        (span for span in spans if span.end - span.start >= least_s),
        key=lambda span: span.start - span.end,
    )
    return sorted(seen[:MAX_SPANS], key=lambda span: (span.start, -span.end))


def _until(activity: RunActivity, span: Span) -> float:
    """When a group left the sample queue to be trained on; for other spans, their end."""
    group = activity.trained(span) if span.kind == "group" else None
    return max(span.end, activity.taken_at.get(group.step or 0, span.end)) if group else span.end


def _bar(activity: RunActivity, span: Span, start: float, end: float) -> Bar:
    begin = max(span.start, start)
    finish = max(min(span.end, end), start)
    level = None
    until = None
    if span.kind == "group":
        level = activity.staleness(span)
        until = round(min(_until(activity, span), end) - start, 4)
    elif span.kind == "decode":
        level = span.version
    return (round(begin - start, 4), round(finish - start, 4), span.what, level, until)
