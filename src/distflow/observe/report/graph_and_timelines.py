"""How steps run: the pipeline as a graph, from plan.json, and timelines of the activities and waits
of rollout and training loop, from the run's spans and ledger. Also exports steps as a Chrome trace
for ui.perfetto.dev and chrome://tracing: a process per worker, a track per lane of its spans, and
counters of speeds and tokens."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from distflow.errors import UserError
from distflow.observe import run_reader as reader
from distflow.observe.crash_safe_files import (
    JSON,
    bytes_left_out,
    encode,
    read_records,
    to_number,
    write_atomically,
)
from distflow.observe.report.summary_sentences import Steps
from distflow.observe.run_reader import Group, MetricsRecord, groups_of, read_spans, span_files
from distflow.observe.writing.run_folder import Span

TRAINING = "train"
"""The name of spans of decoding for training."""

MAX_NODES = 100
MAX_SPANS = 300
MAX_STEPS = 10
_LEAST_SHARE = 0.0005
_MAX_LEDGER_BYTES = 8_000_000
_NODE_LISTS = ("engines", "reads", "writes", "deps")
_STEP = re.compile(r"step (\d+)")


@dataclass(frozen=True)
class RunActivity:
    """spans: by side. taken_at: when a step was taken from the sample queue. groups: in the
    ledger's end. cut: the actors of whose files only the end was read."""

    spans: Mapping[str, Sequence[Span]]
    taken_at: Mapping[int, float]
    groups: Mapping[int, Group]
    cut: frozenset[str]

    def trained(self, span: Span) -> Group | None:
        """The group of a span, if a step trained on this attempt."""
        group = (
            self.groups.get(span.group_id)
            if span.group_id is not None and span.what == "complete"
            else None
        )
        return group if group and group.step is not None else None

    def staleness(self, group: Span) -> int | None:
        """Versions between the oldest weights that drew a token of a group (or, if unknown, those
        that it began with) and those that its step began with; None if no step trained on it, or on
        another attempt."""
        found = self.trained(group)
        version = group.version if found is None or found.version is None else found.version
        return None if found is None or version is None else (found.step or 0) - 1 - version

    def waited(self, start: float, end: float) -> float:
        """The seconds that the trainer waited for groups."""
        return _covered(
            (
                s
                for s in self.spans.get("training", ())
                if s.kind == "wait" and _STEP.fullmatch(s.what)
            ),
            start,
            end,
        )

    def decoded(self, start: float, end: float) -> float:
        """The seconds in which an engine decoded for training; the mean over several engines."""
        decoding = [[s for s in part if s.kind == "decode"] for part in self.spans.values()]
        engines = [[s for s in spans if s.what == TRAINING] for spans in decoding if spans]
        return sum(_covered(spans, start, end) for spans in engines) / max(len(engines), 1)

    def scored(self, start: float, end: float) -> float:
        """The seconds in which a group waited for its scores; the mean over several workers."""
        scores = [[s for s in part if s.what == "scores"] for part in self.spans.values()]
        return sum(_covered(spans, start, end) for spans in scores if spans) / max(
            sum(map(bool, scores)), 1
        )


def read_activity(run_dir: Path, max_bytes: int = 3_000_000) -> RunActivity:
    """The activity of as much of the run as its files' ends hold. max_bytes: see `span_files`."""
    spans, (paths, each) = read_spans(run_dir, max_bytes), span_files(run_dir, max_bytes)
    cut = frozenset(
        path.stem for path in paths if path.stem in spans and bytes_left_out(path, each)
    )
    waits = [s for s in spans.get("training", ()) if s.kind == "wait"]
    taken_at = {int(found[1]): span.end for span in waits if (found := _STEP.fullmatch(span.what))}
    groups = groups_of(
        read_records(run_dir / "ledger.jsonl", max(each, _MAX_LEDGER_BYTES), run_dir)[0]
    )
    return RunActivity(spans, taken_at, groups, cut)


def _covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of a stretch of time that spans cover, counting overlaps once."""
    total = 0.0
    until = start
    for span in sorted(spans, key=lambda span: span.start):
        total += max(min(span.end, end) - max(span.start, until), 0.0)
        until = max(until, span.end)
    return total


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


def waits(activity: RunActivity) -> list[dict[str, Any]]:
    """Who waited for whom, and how long in all, over the spans that were read."""
    seconds: dict[tuple[str, str], float] = {}
    for actor, spans in activity.spans.items():
        for span in (span for span in spans if span.kind == "wait"):
            key = (actor, span.on or span.what)
            seconds[key] = seconds.get(key, 0.0) + span.end - span.start
    longest_first = sorted(seconds.items(), key=lambda each: -each[1])[:MAX_SPANS]
    return [{"who": who, "waits for": on, "seconds": round(s, 3)} for (who, on), s in longest_first]


def _timed(activity: RunActivity, records: Sequence[MetricsRecord]) -> list[_Step]:
    earliest = min(
        (span.start for part in activity.spans.values() for span in part), default=float("inf")
    )
    timed = [
        (record, seconds)
        for record in records
        if (seconds := record.values.get("timing_s/step", 0.0)) > 0
    ]
    return [
        _Step(record.step, record.t - seconds, record.t, record.restart)
        for i, (record, seconds) in enumerate(timed)
        # There is nothing to draw for a step whose spans were lost; the first one begins with a
        # start that has none.
        if record.t - (seconds / 2 if i else 0.0) >= earliest
    ]


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
    is_given = any(
        span.what == "data" and span.kind == "phase" for span in activity.spans.get("training", ())
    )
    for actor, spans in activity.spans.items():
        for (kind, name), own in by_lane(
            "data" if is_given and actor == "rollout" else actor, spans
        ).items():
            inside = [span for span in own if _until(activity, span) > start and span.start < end]
            if kind == "wait":
                inside = _idle(inside, spans)
            if kind == "group":
                drawn, every = _sampled(inside)
                notes += [f"One group of {every} is drawn."] if every > 1 else []
            else:
                drawn = _longest(inside, _LEAST_SHARE * (end - start))
                left_out += len(inside) - len(drawn)
            bars = [_bar(activity, span, start, end) for span in drawn]
            if bars:
                lanes.append({"name": name, "kind": kind, "spans": bars})
    order = ("phase", "group", "decode", "wait")
    lanes.sort(key=lambda lane: order.index(lane["kind"]) if lane["kind"] in order else 1)
    if left_out:
        notes.append(
            f"{left_out} {'spans are' if left_out > 1 else 'span is'} not shown (too short or too "
            "many)."
        )
    return lanes, notes


def by_lane(actor: str, spans: Sequence[Span]) -> Mapping[tuple[str, str], list[Span]]:
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        name = {
            "phase": actor,
            "wait": f"{actor} waits for",
            "decode": f"{actor} decodes: {span.what}",
        }.get(span.kind)
        lanes.setdefault((span.kind, name or f"{actor}: {span.kind}s"), []).append(span)
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
    level = {"group": activity.staleness(span), "decode": span.version}.get(span.kind)
    until = round(min(_until(activity, span), end) - start, 4) if span.kind == "group" else None
    begin = max(span.start, start)
    finish = max(min(span.end, end), start)
    return (round(begin - start, 4), round(finish - start, 4), span.what, level, until)


def drawn_nodes(listed: JSON, steps: Steps) -> list[dict[str, Any]]:
    """The nodes of a plan; empty if it has none, or they do not form a graph.

    deps: nodes that it directly follows, without transitive ones. layer: the number of nodes on the
    longest path to it. seconds: the mean time of its phase per step; None if not timed.
    """
    found = [
        node for node in (listed if isinstance(listed, list) else []) if isinstance(node, dict)
    ]
    nodes = [_node(node, steps) for node in found if isinstance(node.get("name"), str)]
    names = {node["name"] for node in nodes}
    deps = {node["name"]: [dep for dep in node["deps"] if dep in names] for node in nodes}
    try:
        order = list(TopologicalSorter(deps).static_order())
    except CycleError:
        return []
    if len(nodes) > MAX_NODES or len(names) < len(nodes):
        return []
    before: dict[str, set[str]] = {}
    layers: dict[str, int] = {}
    for name in order:
        before[name] = {far for dep in deps[name] for far in (dep, *before[dep])}
        layers[name] = 1 + max((layers[dep] for dep in deps[name]), default=-1)
    for node in nodes:
        own = deps[node["name"]]
        node["deps"] = [dep for dep in own if not any(dep in before[other] for other in own)]
        node["layer"] = layers[node["name"]]
    return nodes


def _node(node: Mapping[str, JSON], steps: Steps) -> dict[str, Any]:
    texts = {key: str(node.get(key, "")) for key in ("name", "role", "plane", "phase")}
    lists = {
        key: value if isinstance(value := node.get(key), list | tuple) else []
        for key in _NODE_LISTS
    }
    names = {key: [item for item in found if isinstance(item, str)] for key, found in lists.items()}
    timing = f"timing_s/{texts['phase']}"
    times = [
        values[timing]
        for values in steps.values()
        if timing in values and texts["plane"] == "training"
    ]
    return {
        **texts,
        **names,
        "layer": 0,
        "seconds": float(f"{sum(times) / len(times):.4g}") if times else None,
    }


_NUM_LAST = 5
_Json = dict[str, Any]
_Windows = Mapping[int, tuple[float, float]]  # by step: when it began and ended


def write_trace(run_dir: Path, steps: str | None, target: Path) -> tuple[int, int]:
    """Returns the first and the last step that the file has."""
    content, windows = trace(run_dir, steps)
    try:
        write_atomically(target, encode(content))
    except OSError as error:
        raise UserError(f"the trace {target} cannot be written: {error.strerror}") from error
    return min(windows), max(windows)


def trace(run_dir: Path, steps: str | None) -> tuple[dict[str, list[_Json]], _Windows]:
    """A Chrome trace, and the windows of the steps that it has. steps: "12", "10-14", or None for
    the last few."""
    timeline = reader.read_timeline(run_dir)
    happened = reader.read_events(run_dir, timeline)
    metrics = reader.read_metrics(run_dir, timeline)
    spans = {
        actor: [span for span in own if timeline.survives(span.restart, span.step or 0)]
        for actor, own in reader.read_spans(run_dir, reader.MAX_BYTES).items()
    }
    is_over = bool(happened) and happened[-1].fields.get("status") in ("finished", "stopped")
    last_step = max((record.step for record in metrics), default=0) if is_over else None
    windows = _windows(spans.get("training", ()), last_step, steps, run_dir)
    begin = min(first for first, _ in windows.values())
    end = max(last for _, last in windows.values())
    tracks: dict[tuple[int, str], int] = {(0, "steps"): 0}
    events = [_event("X", f"step {step}", *window) for step, window in windows.items()]
    for actor, found in spans.items():
        for worker, title, span in _titled(
            actor, [s for s in found if s.start <= end and s.end >= begin]
        ):
            facts = {"step": span.step, "group": span.group_id, "version": span.version}
            place = {"pid": worker, "tid": tracks.setdefault((worker, title), len(tracks))}
            name = f"{span.what}, on {span.on}" if span.on else span.what
            events.append(_event("X", name, span.start, span.end, **place, args=facts))
    for (worker, title), track in tracks.items():
        for kind, name in (("process_name", f"worker {worker}"), ("thread_name", title)):
            events.append(_event("M", kind, begin, pid=worker, tid=track, args={"name": name}))
    for event in (event for event in happened if begin <= event.t <= end and not event.rolled_back):
        events.append(_event("i", event.kind, event.t, s="g", args={"message": event.message}))
    return {"traceEvents": [*events, *_counters(run_dir, metrics, windows)]}, windows


def _event(phase: str, name: str, start: float, end: float | None = None, **fields: Any) -> _Json:
    """An event of the trace, in microseconds."""
    length = {} if end is None else {"dur": round((end - start) * 1e6)}
    return {
        "ph": phase,
        "name": name,
        "ts": round(start * 1e6),
        "pid": 0,
        "tid": 0,
        **length,
        **fields,
    }


def _windows(spans: Sequence[Span], last: int | None, steps: str | None, run_dir: Path) -> _Windows:
    """The windows of the wanted steps. spans: of the leading trainer. last: the run's last step;
    None if it failed."""
    known = dict[int, tuple[float, float]]()
    for step, span in ((span.step or 0, span) for span in spans if span.kind == "phase"):
        if 0 < step <= (last or step):
            begin, end = known.get(step, (span.start, span.end))
            known[step] = min(begin, span.start), max(end, span.end)
    if not known:
        raise UserError(
            f"{run_dir} has no spans of a training step in spans/training.jsonl: there is nothing "
            "to trace"
        )
    wanted = re.fullmatch(
        r"(\d{1,12})(?:-(\d{1,12}))?", steps or f"{max(max(known) - _NUM_LAST + 1, 0)}-{max(known)}"
    )
    if wanted is None or int(wanted[1]) > int(wanted[2] or wanted[1]):
        raise UserError(f"STEPS is a step such as 12, or steps such as 10-14, not '{steps}'")
    first_step = int(wanted[1])
    last_step = int(wanted[2] or wanted[1])
    if not (
        windows := {
            step: window for step, window in known.items() if first_step <= step <= last_step
        }
    ):
        raise UserError(
            f"{run_dir} has the spans of steps {min(known)} to {max(known)}, but none of {steps}"
        )
    return windows


def _titled(actor: str, spans: Sequence[Span]) -> Iterator[tuple[int, str, Span]]:
    """Each span with its worker and the title of its track: several if spans other than phases
    overlap."""
    name, _, part = actor.rpartition("-") if re.search(r"-[0-9]{1,6}$", actor) else (actor, "", "0")
    for (kind, lane), own in by_lane(name, spans).items():
        ends: list[tuple[float, int]] = []
        for span in sorted(own, key=lambda span: (span.start, -span.end)):
            is_free = ends and (kind == "phase" or ends[0][0] <= span.start)
            number = heappop(ends)[1] if is_free else len(ends)
            heappush(ends, (span.end, number))
            yield int(part), f"{lane} {number + 1}" if number else lane, span


def _counters(
    run_dir: Path, metrics: Sequence[reader.MetricsRecord], windows: _Windows
) -> Iterator[_Json]:
    """The speeds of each step from its start on, and the tokens of all groups completed so far."""
    for step, values in (
        (each.step, each.values)
        for each in metrics
        if each.kind == "train" and each.step in windows
    ):
        for name in (name for name in values if name.startswith("throughput/")):
            yield _event("C", name, windows[step][0], args={name: values[name]})
    tokens = 0.0
    begin = min(windows.values())[0]
    end = max(last for _, last in windows.values())
    for record in read_records(run_dir / "ledger.jsonl", reader.MAX_BYTES, run_dir)[0]:
        t = to_number(record.get("t")) or 0.0
        if record.get("kind") == "complete" and begin <= t <= end:
            tokens += sum(to_number(each.get("tokens")) or 0.0 for each in reader.by_group(record))
            yield _event("C", "tokens of completed groups", t, args={"tokens": tokens})
