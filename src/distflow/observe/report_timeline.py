"""The time line of a step: what learner and experience plane did and waited for, from the spans of the run's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from distflow.observe.run_reader import MetricsRecord, Span, read_spans

MAX_SPANS = 300
_LEAST_SHARE = 0.0005


class Lane(TypedDict):
    """kind: of its spans. spans: [start, end, what], in seconds since the step began."""

    name: str
    kind: str
    spans: list[tuple[float, float, str]]


class StepTimeline(TypedDict):
    """why: what makes the step one to look at. left_out: spans that are too many, or too short to be seen."""

    step: int
    why: str
    seconds: float
    lanes: list[Lane]
    left_out: int


def timelines(run_dir: Path, records: Sequence[MetricsRecord]) -> list[StepTimeline]:
    """Of a usual step, the slowest one and the last one; none where nothing was timed. records: that survive."""
    spans = read_spans(run_dir)
    earliest = min((span.start for part in spans.values() for span in part), default=float("inf"))
    timed = [(record, seconds) for record in records if (seconds := record.values.get("timing_s/step", 0.0)) > 0]
    steps = [
        (record.step, record.t - seconds, record.t)
        for i, (record, seconds) in enumerate(timed)
        # Of a step whose spans were lost there is nothing to draw; the first one begins with a start that has none.
        if record.t - (seconds / 2 if i else 0.0) >= earliest
    ]
    if not steps:
        return []
    by_length = sorted(steps, key=lambda step: step[2] - step[1])
    chosen: dict[int, str] = {}
    for why, (number, _, _) in (
        ("a usual step", by_length[len(by_length) // 2]),
        ("the slowest step", by_length[-1]),
        ("the last step", steps[-1]),
    ):
        chosen.setdefault(number, why)
    found = {number: _timeline(number, why, window, spans) for number, why, window in _windows(steps, chosen)}
    return [found[number] for number in chosen if found[number]["lanes"]]


def _windows(
    steps: Sequence[tuple[int, float, float]], chosen: Mapping[int, str]
) -> list[tuple[int, str, tuple[float, float]]]:
    return [(number, chosen[number], (start, end)) for number, start, end in steps if number in chosen]


def _timeline(step: int, why: str, window: tuple[float, float], spans: Mapping[str, Sequence[Span]]) -> StepTimeline:
    start, end = window
    lanes: list[Lane] = []
    left_out = 0
    for actor, all_spans in spans.items():
        for kind in dict.fromkeys(span.kind for span in all_spans):
            inside = [s for s in all_spans if s.kind == kind and s.end > start and s.start < end]
            seen = [s for s in inside if s.end - s.start >= _LEAST_SHARE * (end - start)]
            # Longer ones first where two begin together: what lies within another is drawn upon it.
            seen.sort(key=lambda s: (s.start, -s.end))
            left_out += len(inside) - len(seen[:MAX_SPANS])
            clipped = [(max(s.start, start) - start, min(s.end, end) - start, s.what) for s in seen[:MAX_SPANS]]
            if clipped:
                name = {"phase": actor, "wait": f"{actor} waits for"}.get(kind, f"{actor}: {kind}s")
                rounded = [(round(a, 4), round(b, 4), what) for a, b, what in clipped]
                lanes.append({"name": name, "kind": kind, "spans": rounded})
    lanes.sort(key=lambda lane: (lane["kind"] != "phase", lane["kind"] == "wait"))
    return {"step": step, "why": why, "seconds": round(end - start, 4), "lanes": lanes, "left_out": left_out}
