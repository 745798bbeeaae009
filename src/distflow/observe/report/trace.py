"""Steps of a run as a Chrome trace for ui.perfetto.dev: a process per worker, a track for each
loop's phases and for what runs side by side, and counters of speeds."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.observe import run_reader as reader
from distflow.observe.crash_safe_files import encode, write_atomically
from distflow.observe.writing.run_folder import Span

_NUM_LAST = 5
_PART = re.compile(r"-([0-9]{1,6})$")
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

    spans = {}
    for actor, recorded in reader.read_spans(run_dir, reader.MAX_BYTES).items():
        spans[actor] = [
            span for span in recorded if timeline.survives(span.restart, span.step or 0)
        ]

    last_step = None
    if happened and happened[-1].fields.get("status") in ("finished", "stopped"):
        last_step = max((record.step for record in metrics), default=0)
    windows = _windows(spans.get("training", ()), last_step, steps, run_dir)
    begin = min(first for first, _ in windows.values())
    end = max(last for _, last in windows.values())

    events = [_event("X", f"step {step}", *window) for step, window in windows.items()]
    events += _titles(begin, {"pid": 0, "tid": 0}, "steps")
    for track, (actor, of_actor) in enumerate(spans.items(), 1):
        worker = _PART.search(actor)
        place = {"pid": int(worker[1]) if worker else 0, "tid": track}

        events += _titles(begin, place, actor)
        for span in of_actor:
            if span.start <= end and span.end >= begin:
                events += _events_of(span, place, len(events))

    for event in happened:
        if begin <= event.t <= end and not event.rolled_back:
            args = {"message": event.message}
            events.append(_event("i", event.kind, event.t, s="g", args=args))

    events += _counters(metrics, windows)
    return {"traceEvents": events}, windows


def _event(phase: str, name: str, start: float, end: float | None = None, **fields: Any) -> _Json:
    """An event of the trace, in microseconds."""
    event = {"ph": phase, "name": name, "ts": round(start * 1e6), "pid": 0, "tid": 0, **fields}
    if end is not None:
        event["dur"] = round((end - start) * 1e6)
    return event


def _titles(begin: float, place: Mapping[str, int], track: str) -> list[_Json]:
    worker = {"name": f"worker {place['pid']}"}
    return [
        _event("M", "process_name", begin, **place, args=worker),
        _event("M", "thread_name", begin, **place, args={"name": track}),
    ]


def _events_of(span: Span, place: Mapping[str, int], number: int) -> list[_Json]:
    """A phase, which lies within another or beside it; any other span may overlap, and has a begin
    and an end that share a number."""
    name = f"{span.what}, on {span.on}" if span.on else span.what
    facts = {"step": span.step, "group": span.group_id, "version": span.version}
    if span.kind == "phase":
        return [_event("X", name, span.start, span.end, **place, args=facts)]

    own: _Json = {**place, "cat": span.kind, "id": number}
    begin = _event("b", name, span.start, **own, args=facts)
    return [begin, _event("e", name, span.end, **own)]


def _windows(spans: Sequence[Span], last: int | None, steps: str | None, run_dir: Path) -> _Windows:
    """The windows of the wanted steps. spans: of the leading trainer. last: the run's last step;
    None if it failed."""
    known = dict[int, tuple[float, float]]()
    for span in spans:
        step = span.step or 0
        if span.kind == "phase" and 0 < step <= (last or step):
            begin, end = known.get(step, (span.start, span.end))
            known[step] = min(begin, span.start), max(end, span.end)

    if not known:
        raise UserError(
            f"{run_dir} has no spans of a training step in spans/training.jsonl: there is nothing "
            "to trace"
        )

    if steps is None:
        last_step = max(known)
        first_step = max(last_step - _NUM_LAST + 1, 0)
    else:
        wanted = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", steps)
        if wanted is None or int(wanted[1]) > int(wanted[2] or wanted[1]):
            raise UserError(f"STEPS is a step such as 12, or steps such as 10-14, not '{steps}'")
        first_step = int(wanted[1])
        last_step = int(wanted[2] or wanted[1])

    windows = {}
    for step, window in known.items():
        if first_step <= step <= last_step:
            windows[step] = window

    if not windows:
        raise UserError(
            f"{run_dir} has the spans of steps {min(known)} to {max(known)}, but none of {steps}"
        )

    return windows


def _counters(metrics: Sequence[reader.MetricsRecord], windows: _Windows) -> Iterator[_Json]:
    """The speeds of each step from its start on."""
    for record in metrics:
        if record.kind != "train" or record.step not in windows:
            continue
        for name, value in record.values.items():
            if name.startswith("throughput/"):
                yield _event("C", name, windows[record.step][0], args={name: value})
