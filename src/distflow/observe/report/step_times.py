"""Where the time of a step goes: seconds of each phase of the training loops, who waits for whom,
and the idle time of the workers.

A worker is idle while its training loop waits and its engine draws no token and loads no weights.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from distflow.errors import count_of
from distflow.observe.report.activity import Interval, RunActivity, covered
from distflow.observe.run_reader import MetricsRecord
from distflow.observe.writing.run_folder import Span
from distflow.observe.writing.timing import ENGINE

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

    parts: list[Part]

    workers: int

    idle: dict[int, float]
    """Seconds of all workers together by step."""

    idle_causes: dict[tuple[int, str], float]
    """By step and by whom anything waited for meanwhile; several at once count each."""

    def add_idle(
        self, step: int, work: Sequence[Interval], waits: Mapping[str, Sequence[Interval]]
    ) -> None:
        """Add a worker's idle time in a step. work: when it works. waits: when anything waits, by
        for whom."""
        begin, end = self.windows[step]
        worked = covered(work)
        self.idle[step] = self.idle.get(step, 0.0) + end - begin - worked

        for cause, intervals in waits.items():
            idle = covered([*work, *intervals]) - worked
            if idle > 0:
                self.idle_causes[step, cause] = self.idle_causes.get((step, cause), 0.0) + idle

    def seconds(self, steps: Iterable[int]) -> float:
        """The time of all workers in some steps."""
        windows = [self.windows[step] for step in steps]
        return self.workers * sum(end - start for start, end in windows)

    def idle_share(self, steps: Iterable[int] | None = None) -> float | None:
        """Of the time of all workers in these steps; None if there is no such time."""
        chosen = list(self.windows if steps is None else steps)
        total = self.seconds(chosen)
        if total:
            return sum(self.idle.get(step, 0.0) for step in chosen) / total
        return None

    def waits(self, steps: Iterable[int] | None = None) -> dict[tuple[str, str], float]:
        """Seconds by who waits for whom, the longest first."""
        chosen = set(self.windows if steps is None else steps)
        found = defaultdict[tuple[str, str], float](float)
        for part in self.parts:
            if part.waits_for and part.step in chosen:
                found[part.actor, part.waits_for] += part.seconds
        return dict(sorted(found.items(), key=lambda wait: -wait[1]))


def step_times(activity: RunActivity, records: Sequence[MetricsRecord]) -> StepTimes:
    """records: the surviving ones of the run."""
    windows = _step_windows(activity, records)
    workers = set()
    for actor in activity.spans:
        kind, _, worker = actor.partition("-")
        if kind in ("training", "rollout", "engine"):
            workers.add(worker)

    times = StepTimes(windows, [], len(workers), {}, {})
    all_spans = chain.from_iterable(activity.spans.values())
    logs_decoding = any(span.kind == "decode" for span in all_spans)

    for step, spans in _by_step(activity.spans, windows).items():
        busy: dict[str, list[Interval]] = {worker: [] for worker in workers}
        waits = defaultdict[str, list[Interval]](list)
        for actor, of_actor in spans.items():
            kind, _, worker = actor.partition("-")
            parts = _loop_parts(of_actor) if kind == "training" else _waits_by_cause(of_actor)
            for (phase, waits_for), intervals in parts.items():
                times.parts.append(Part(step, actor, phase, waits_for, covered(intervals)))
                if not waits_for:
                    busy[worker] += intervals
                elif (kind, waits_for) != ("training", "rollout"):  # whose groups wait for others
                    waits[waits_for] += intervals

            if kind in ("engine", "rollout"):
                busy[worker] += _engine_work(of_actor, logs_decoding)

        for work in busy.values():
            times.add_idle(step, work, waits)

    return times


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
    in_order = [span for span in spans if span.kind in ("phase", "wait")]

    # A wait that is as long as its phase is within it.
    in_order.sort(key=lambda span: (span.start, -span.end, span.kind == "wait"))

    found = defaultdict[tuple[str, str], list[Interval]](list)
    running: list[Span] = []
    now = -inf
    for span in [*in_order, Span(inf, inf, "", "")]:
        while running and now < span.start:
            inner = running[-1]
            until = min(inner.end, span.start)
            if until > now:
                phases = [outer.what for outer in running if outer.kind == "phase"]
                waits_for = ""
                if inner.kind == "wait":
                    waits_for = inner.on or inner.what

                found[phases[-1] if phases else "", waits_for].append((now, until))
                now = until

            if inner.end <= now:
                running.pop()

        now = max(now, span.start)
        running.append(span)

    return found


def _waits_by_cause(spans: Iterable[Span]) -> dict[tuple[str, str], list[Interval]]:
    """When the tasks of an actor wait."""
    found = defaultdict[tuple[str, str], list[Interval]](list)
    for span in spans:
        waits_for = span.on or span.what
        if span.kind == "wait" and waits_for:
            found["", waits_for].append((span.start, span.end))
    return found


def _engine_work(spans: Iterable[Span], logs_decoding: bool) -> list[Interval]:
    """When an engine draws tokens or loads weights. One that logs no decoding, such as a server,
    works while a rollout loop has a request."""
    work = []
    for span in spans:
        has_request = span.on == ENGINE and not logs_decoding
        if span.kind == "decode" or span.what.startswith(_SWAPS) or has_request:
            work.append((span.start, span.end))
    return work


def _by_step(
    spans: Mapping[str, Iterable[Span]], windows: Mapping[int, Interval]
) -> dict[int, dict[str, list[Span]]]:
    """The spans of each actor in each step, cut to the step."""
    steps = list(windows)
    ends = [end for _, end in windows.values()]

    found: dict[int, dict[str, list[Span]]] = {step: {} for step in steps}
    for actor, of_actor in spans.items():
        for span in of_actor:
            for place in range(bisect_right(ends, span.start), len(steps)):
                begin, end = windows[steps[place]]
                if begin >= span.end:
                    break

                inside = span
                if span.start < begin or span.end > end:
                    inside = replace(span, start=max(span.start, begin), end=min(span.end, end))
                found[steps[place]].setdefault(actor, []).append(inside)

    return found


def times_json(times: StepTimes) -> dict[str, Any]:
    """For a page. bars: the last steps, each with the seconds of the first training loop by place
    in `parts`."""
    first_loop = min((part.actor for part in times.parts if part.phase), default="training")
    bars: dict[int, dict[int, float]] = {step: {} for step in list(times.windows)[-_MAX_BARS:]}
    places: dict[tuple[str, str], int] = {}
    for part in times.parts:
        if part.actor == first_loop and part.step in bars:
            place = places.setdefault((part.phase, part.waits_for), len(places))
            bars[part.step][place] = bars[part.step].get(place, 0.0) + part.seconds

    waits = []
    for (who, on), seconds in list(times.waits().items())[:_MAX_ROWS]:
        waits.append({"who": who, "waits for": on, "seconds": round(seconds, 3)})
    return {
        "parts": [{"phase": phase, "waits_for": waits_for} for phase, waits_for in places],
        "bars": [{"steps": str(step), "seconds": seconds} for step, seconds in bars.items()],
        "waits": waits,
        "workers": times.workers,
        "seconds": times.seconds(times.windows),
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

    longest = sorted(phases.items(), key=lambda phase: -phase[1])
    worked = [f"{name} {seconds:.2f}" for name, seconds in longest]
    waits_of_step = times.waits([step]).items()
    waits = [f"{who} for {on} {seconds:.2f}" for (who, on), seconds in waits_of_step]

    return [
        f"time      {end - start:.2f} s: {', '.join(worked)}",
        f"waits     {', '.join(waits) or 'none'}",
        f"idle      {times.idle_share([step]) or 0.0:.0%} of {count_of(times.workers, 'worker')}",
    ]
