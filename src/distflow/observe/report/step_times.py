"""Where the time of a step goes: seconds of each phase of the training loops, who waits for whom,
and the idle time of the workers.

A worker is idle while its training loop waits and its engine draws no token and loads no weights.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from distflow.errors import count_of
from distflow.observe.report.activity import RunActivity
from distflow.observe.run_reader import MetricsRecord
from distflow.observe.writing.run_folder import Span
from distflow.observe.writing.timing import ENGINE

Interval = tuple[float, float]
"""Begin and end in seconds since the epoch. Lists of them are sorted and do not overlap."""

_SWAPS = ("weights of step", "version number of step")
"""Beginnings of an engine's waits in which it loads weights."""
_MAX_BARS = 200
_MAX_ROWS = 100


class Part(NamedTuple):
    """Seconds of an actor in one step: of a phase of a training loop, or of a wait of any actor."""

    step: int
    actor: str
    phase: str
    """Empty for a rollout loop, an engine and reward functions."""
    waits_for: str
    """Empty while it works."""
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """Of all steps whose spans were read."""

    windows: Mapping[int, Interval]
    """When each step ran."""

    parts: Sequence[Part]

    workers: int

    idle: Mapping[int, float]
    """Seconds of all workers together by step."""

    idle_causes: Mapping[tuple[int, str], float]
    """By step and by whom anything waited for meanwhile; several at once count each."""

    def seconds(self, steps: Iterable[int]) -> float:
        """The time of all workers in some steps."""
        windows = [self.windows[step] for step in steps]
        return self.workers * sum(end - start for start, end in windows)

    def idle_share(self, steps: Iterable[int] | None = None) -> float | None:
        """Of the time of all workers in these steps; None if there is no such time."""
        chosen = list(self.windows if steps is None else steps)
        total = self.seconds(chosen)
        return sum(self.idle.get(step, 0.0) for step in chosen) / total if total else None

    def waits(self, steps: Iterable[int] | None = None) -> dict[tuple[str, str], float]:
        """Seconds by who waits for whom, the longest first."""
        chosen = set(self.windows if steps is None else steps)
        found = defaultdict[tuple[str, str], float](float)
        for part in self.parts:
            if part.waits_for and part.step in chosen:
                found[part.actor, part.waits_for] += part.seconds
        return dict(sorted(found.items(), key=lambda each: -each[1]))


def step_times(activity: RunActivity, records: Sequence[MetricsRecord]) -> StepTimes:
    """records: the surviving ones of the run."""
    windows = _step_windows(activity, records)
    parts = list[Part]()
    busy: dict[str, list[Interval]] = {}
    waited = defaultdict[str, list[Interval]](list)
    for actor, spans in activity.spans.items():
        kind, _, number = actor.partition("-")
        found = _loop_parts(spans) if kind == "training" else _waits_by_cause(spans)
        for (phase, waits_for), own in found.items():
            for step, seconds in _by_step(own, windows):
                parts.append(Part(step, actor, phase, waits_for, seconds))
            if not waits_for:
                busy.setdefault(number, []).extend(own)
            elif (kind, waits_for) != ("training", "rollout"):  # whose groups wait for others
                waited[waits_for] += own
        if kind in ("training", "rollout", "engine"):
            busy.setdefault(number, []).extend(_engine_work(activity.spans, number))
    idle = defaultdict[int, float](float)
    causes = defaultdict[tuple[int, str], float](float)
    for work in busy.values():
        own_idle = _common([*windows.values()], _gaps(_merged(work)))
        for step, seconds in _by_step(own_idle, windows):
            idle[step] += seconds
        for cause, waits in waited.items():
            for step, seconds in _by_step(_common(own_idle, _merged(waits)), windows):
                causes[step, cause] += seconds
    return StepTimes(windows, parts, len(busy), idle, causes)


def _step_windows(activity: RunActivity, records: Sequence[MetricsRecord]) -> dict[int, Interval]:
    """Without steps of which spans are missing. The first step of a restart begins with the
    restart's first span."""
    starts: dict[int, float] = {}
    known_from = -inf
    for actor, spans in activity.spans.items():
        for span in spans:
            starts[span.restart] = min(span.start, starts.get(span.restart, inf))
        if actor in activity.cut:
            known_from = max(known_from, min(span.start for span in spans))
    windows: dict[int, Interval] = {}
    before = -inf
    for record in records:
        if record.kind != "train":
            continue
        start = max(before, starts.get(record.restart, record.t))
        if record.t > start >= known_from:
            windows[record.step] = (start, record.t)
        before = max(before, record.t)
    return windows


def _loop_parts(spans: Iterable[Span]) -> dict[tuple[str, str], list[Interval]]:
    """The time of a training loop by phase, and by whom it waits for in it. Of spans within one
    another the innermost counts."""
    own = [span for span in spans if span.kind in ("phase", "wait")]
    # A wait that is as long as its phase is within it.
    in_order = sorted(own, key=lambda span: (span.start, -span.end, span.kind == "wait"))
    found = defaultdict[tuple[str, str], list[Interval]](list)
    running: list[Span] = []
    now = -inf
    for span in [*in_order, Span(inf, inf, "", "")]:
        while running and now < span.start:
            inner = running[-1]
            until = min(inner.end, span.start)
            if until > now:
                phases = [each.what for each in running if each.kind == "phase"]
                waits_for = (inner.on or inner.what) if inner.kind == "wait" else ""
                found[phases[-1] if phases else "", waits_for].append((now, until))
                now = until
            if inner.end <= now:
                running.pop()
        now = max(now, span.start)
        running.append(span)
    return found


def _waits_by_cause(spans: Iterable[Span]) -> dict[tuple[str, str], list[Interval]]:
    """When at least one task of an actor waits."""
    found = defaultdict[tuple[str, str], list[Interval]](list)
    for span in spans:
        if span.kind == "wait":
            found["", span.on or span.what].append((span.start, span.end))
    return {cause: _merged(own) for cause, own in found.items()}


def _engine_work(spans: Mapping[str, Sequence[Span]], number: str) -> list[Interval]:
    """When an engine draws tokens or loads weights. One that logs no decoding, such as a server,
    works while it has a request."""
    suffix = f"-{number}" if number else ""
    own = spans.get(f"engine{suffix}", ())
    work = [span for span in own if span.kind == "decode" or span.what.startswith(_SWAPS)]
    if not any(span.kind == "decode" for span in own):
        work += [span for span in spans.get(f"rollout{suffix}", ()) if span.on == ENGINE]
    return [(span.start, span.end) for span in work]


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def _gaps(intervals: Sequence[Interval]) -> list[Interval]:
    """The time around and between them."""
    starts = [-inf, *(end for _, end in intervals)]
    ends = [*(start for start, _ in intervals), inf]
    return list(zip(starts, ends, strict=True))


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    ends = [end for _, end in b]
    for start, end in a:
        for place in range(bisect_right(ends, start), len(b)):
            begin, until = b[place]
            if begin >= end:
                break
            found.append((max(start, begin), min(end, until)))
    return found


def _by_step(
    intervals: Iterable[Interval], windows: Mapping[int, Interval]
) -> Iterator[tuple[int, float]]:
    """The seconds of the intervals in each step that they touch."""
    steps = list(windows)
    ends = [end for _, end in windows.values()]
    seconds = defaultdict[int, float](float)
    for start, end in intervals:
        for place in range(bisect_right(ends, start), len(steps)):
            begin, until = windows[steps[place]]
            if begin >= end:
                break
            seconds[steps[place]] += min(end, until) - max(start, begin)
    yield from seconds.items()


def times_json(times: StepTimes) -> dict[str, Any]:
    """For a page, and for `--json`. bars: a run of steps each, with the seconds of the first
    training loop by place in `parts`."""
    steps = list(times.windows)
    size = -(-len(steps) // _MAX_BARS) or 1
    bars = []
    bar_of: dict[int, defaultdict[int, float]] = {}
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        name = f"{group[0]}-{group[-1]}" if size > 1 else str(group[0])
        seconds = defaultdict[int, float](float)
        bars.append({"steps": name, "seconds": seconds})
        bar_of |= dict.fromkeys(group, seconds)
    first_loop = min((part.actor for part in times.parts if part.phase), default="training")
    places: dict[tuple[str, str], int] = {}
    for part in times.parts:
        if part.actor == first_loop:
            place = places.setdefault((part.phase, part.waits_for), len(places))
            bar_of[part.step][place] += part.seconds
    waits = [
        {"who": who, "waits for": on, "seconds": round(seconds, 3)}
        for (who, on), seconds in times.waits().items()
    ]
    return {
        "parts": [{"phase": phase, "waits_for": waits_for} for phase, waits_for in places],
        "bars": bars,
        "waits": waits[:_MAX_ROWS],
        "workers": times.workers,
        "seconds": times.seconds(steps),
        "idle": sum(times.idle.values()),
    }


def times_lines(times: StepTimes, step: int) -> list[str]:
    """The time of one step in lines of text."""
    if step not in times.windows:
        return []
    start, end = times.windows[step]
    phases = defaultdict[str, float](float)
    for part in times.parts:
        if part.step == step and part.actor == "training" and not part.waits_for:
            phases[part.phase] += part.seconds
    longest = sorted(phases.items(), key=lambda each: -each[1])
    worked = [f"{name} {seconds:.2f}" for name, seconds in longest]
    waits = [f"{who} for {on} {s:.2f}" for (who, on), s in times.waits([step]).items()]
    return [
        f"time      {end - start:.2f} s: {', '.join(worked)}",
        f"waits     {', '.join(waits) or 'none'}",
        f"idle      {times.idle_share([step]) or 0.0:.0%} of {count_of(times.workers, 'worker')}",
    ]
