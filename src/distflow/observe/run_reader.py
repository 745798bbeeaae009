"""Reads a run's folder: while it is written, after a crash, and across resumes.

After a resume from step k, records of earlier restarts about later steps are invalid. Readers
return the surviving timeline; events, being history, are all returned and marked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern

import yaml

from distflow.errors import UserError, count_of
from distflow.observe.crash_safe_files import (
    JSON,
    LATEST_TIME,
    encode,
    is_deep,
    iter_records,
    read_records,
    time_of,
    to_number,
    whole,
)
from distflow.observe.sample_files import (
    DROPPED,
    SAMPLES,
    SCHEMA_VERSION,
    is_torn,
    newer,
    read_sample_file,
    sample_file_name,
)
from distflow.observe.writing.run_folder import Span
from distflow.untrusted_files import MAX_YAML_BYTES, load_yaml, read_file

MAX_BYTES = 64 * 2**20
"""Limit for metrics and for events in a report: only the ends of longer files are read."""

MAX_SAMPLE_BYTES = 16 * 2**20
"""Limit for the samples of a step, in memory."""

_MAX_NAME = 200
_MAX_SPAN_FILES = 100
_MAX_SPAN_BYTES = 40 * 2**20
_MAX_SPLITS = 20
_MAX_SENTENCES = 500
_EVENT_KEYS = ("t", "restart", "kind", "message", "step")
_SAMPLE_FILE = re.compile(r"(?:(.+)-)?(\d{6,18})(?:\.\d+)?\.parquet")


VALIDATION_ROWS = "validation_rows"
"""The event of each start, and its field, with a hash of the rows that it validates on."""


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """The metrics of one step and kind, under flat names such as "actor/loss"; `t` is seconds since
    the epoch."""

    step: int
    t: float
    restart: int
    kind: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """An event. `rolled_back`: it was at a step that a later restart rolled back."""

    t: float
    restart: int
    kind: str
    message: str
    step: int | None
    fields: Mapping[str, JSON]
    rolled_back: bool


@dataclass(frozen=True)
class Timeline:
    """For each restart that resumed, the last step of earlier restarts that it kept."""

    kept_until: Mapping[int, int] = field(default_factory=dict)

    def survives(self, restart: int, step: int) -> bool:
        """Whether records of `step` by `restart` are still valid after later restarts."""
        return all(step <= kept for later, kept in self.kept_until.items() if later > restart)


def comparable_validations(
    records: Sequence[MetricsRecord], events: Sequence[Event]
) -> tuple[list[MetricsRecord], int | None]:
    """The records without the validations on other rows than those of the last start; and the first
    step of those on its rows, None if no validation was left out."""
    rows = {}
    for event in events:
        if event.kind == VALIDATION_ROWS:
            rows[event.restart] = event.fields.get(VALIDATION_ROWS)

    last = rows[max(rows)] if rows else None
    kept = []
    for record in records:
        if record.kind != "val" or rows.get(record.restart, last) == last:
            kept.append(record)

    first = min((record.step for record in kept if record.kind == "val"), default=None)
    return kept, None if len(kept) == len(records) else first


def read_config(run_dir: Path) -> dict[str, JSON]:
    """The resolved configuration of config.yaml; empty if it is missing or not a mapping."""
    try:
        values = load_yaml(read_file(run_dir / "config.yaml", run_dir, MAX_YAML_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}

    if isinstance(values, dict) and not is_deep(values):
        return values
    return {}


def flat_config(run_dir: Path) -> dict[str, str]:
    """The values of config.yaml by dotted key, as JSON."""
    found: dict[str, str] = {}

    def add(key: str, value: JSON) -> None:
        if isinstance(value, dict) and (value or not key):
            for name, below in value.items():
                add(f"{key}.{name}" if key else str(name), below)
        else:
            found[key] = encode(value).decode()

    add("", read_config(run_dir))
    return found


def span_files(run_dir: Path, max_bytes: int) -> tuple[list[Path], int]:
    """The files of spans, and how much of the end of each is read: at most `max_bytes`, and 40 MB
    of all."""
    paths = sorted((run_dir / "spans").glob("*.jsonl"))[:_MAX_SPAN_FILES]
    return paths, min(max_bytes, _MAX_SPAN_BYTES // max(len(paths), 1))


def read_spans(run_dir: Path, max_bytes: int = 3_000_000) -> dict[str, list[Span]]:
    """The last spans of each actor, as many as its file's end holds; see `span_files`."""
    paths, each = span_files(run_dir, max_bytes)
    spans = {}
    for path in paths:
        of_actor = list(filter(None, map(_span, iter_records(path, each, run_dir))))
        if of_actor:
            spans[path.stem] = of_actor

    return spans


def read_timeline(run_dir: Path, max_bytes: int | None = MAX_BYTES) -> Timeline:
    """The last step that each resume kept, from its start event.

    max_bytes: here and below, how much of each file's end is read; None for all. Raises UserError
    if a newer distflow wrote the folder.
    """
    kept_until = {}
    for event in read_records(run_dir / "events.jsonl", max_bytes, run_dir)[0]:
        if event.get("kind") != "start":
            continue

        version = whole(event.get("schema")) or 0
        if version > SCHEMA_VERSION:
            raise UserError(newer(run_dir, version))

        restart = whole(event.get("restart"))
        step = whole(event.get("resumed_at"))
        if restart and step is not None:
            kept_until[restart] = step

    return Timeline(kept_until)


def read_damage(run_dir: Path) -> list[str]:
    """A sentence for each file of metrics or events with unreadable lines, which readers skip, for
    damaged files of samples, and for files that are too large to read whole."""
    found = []
    num_lines = {"metrics.jsonl": 0}
    for raw in iter_records(run_dir / "metrics.jsonl", MAX_BYTES, run_dir):
        num_lines["metrics.jsonl"] += raw is None or _metrics_record(raw) is None
    num_lines["events.jsonl"] = read_records(run_dir / "events.jsonl", MAX_BYTES, run_dir)[1]

    for name, number in num_lines.items():
        if number:
            lines = count_of(number, "line")
            found.append(f"{lines} of {name} cannot be read: their content is missing here")

        file = run_dir / name
        left_out = 0
        if file.is_file():
            left_out = file.stat().st_size - MAX_BYTES

        if left_out > 0:
            found.append(f"{name} is too long: its first {left_out:,} bytes are missing here")

    for file, _, _ in sample_files(run_dir):
        if is_torn(file, run_dir) and len(found) < _MAX_SENTENCES:
            found.append(f"{SAMPLES}/{file.name} is damaged: its samples are missing here")

    return found


def read_metrics(
    run_dir: Path, timeline: Timeline | None = None, max_bytes: int | None = MAX_BYTES
) -> list[MetricsRecord]:
    """The surviving records by step, in the order of writing within one; a restart replaces older
    records. What several processes of the run wrote for one step is one record, with the first
    value of each metric.

    timeline: here and below, saves reading it again.
    """
    timeline = timeline or read_timeline(run_dir, max_bytes)
    found: dict[tuple[int, str], MetricsRecord] = {}
    for raw in iter_records(run_dir / "metrics.jsonl", max_bytes, run_dir):
        record = None if raw is None else _metrics_record(raw)
        if record is None or not timeline.survives(record.restart, record.step):
            continue

        key = (record.step, record.kind)
        known = found.get(key)
        if known is None or known.restart < record.restart:
            found.pop(key, None)  # so that it comes last
            found[key] = record
        elif known.restart == record.restart:
            found[key] = replace(known, values={**record.values, **known.values})

    return sorted(found.values(), key=lambda record: record.step)


def read_events(
    run_dir: Path, timeline: Timeline | None = None, max_bytes: int | None = MAX_BYTES
) -> list[Event]:
    """All events in the order of writing."""
    timeline = timeline or read_timeline(run_dir, max_bytes)
    return [
        _event(record, timeline)
        for record in read_records(run_dir / "events.jsonl", max_bytes, run_dir)[0]
    ]


def sample_files(run_dir: Path) -> list[tuple[Path, str, int]]:
    """All files of samples with their splits and steps, by name."""
    files = []
    for file in sorted((run_dir / SAMPLES).glob("*.parquet")):
        match = _SAMPLE_FILE.fullmatch(file.name)
        if match:
            files.append((file, match[1] or "train", int(match[2])))
    return files


def sample_steps(run_dir: Path, split: str = "train") -> list[int]:
    """The steps that have a sample file, ascending, even if rolled back; `read_samples` tells which
    are."""
    return sorted({step for _, name, step in sample_files(run_dir) if name == split})


def sample_splits(run_dir: Path) -> list[str]:
    """The splits that have sample files, "train" first if present; without dropped groups."""
    found = {split for _, split, _ in sample_files(run_dir)} - {DROPPED}
    return sorted(found, key=lambda split: (split != "train", split))[:_MAX_SPLITS]


def read_samples(
    run_dir: Path,
    step: int,
    split: str = "train",
    timeline: Timeline | None = None,
    max_bytes: int | None = MAX_SAMPLE_BYTES,
    damage: list[str] | None = None,
) -> list[dict[str, JSON]]:
    """The samples of a step; empty if there are none or the step was rolled back. Numbers may be
    NaN or infinite.

    damage: gets a sentence for each file of it that is damaged or too long.
    """
    first = run_dir / SAMPLES / sample_file_name(step, split)
    parts = first.parent.glob(f"{first.stem}.*.parquet")
    in_order = sorted(parts, key=lambda path: (len(path.name), path.name))
    files = [read_sample_file(path, run_dir, max_bytes) for path in (first, *in_order)]
    timeline = timeline or read_timeline(run_dir)

    samples = []
    for rows, fault in files:
        if fault and damage is not None:
            damage.append(fault)
        for row in rows:
            if timeline.survives(whole(row["restart"]) or 0, step):
                samples.append(_sample(row))

    return samples


def _metrics_record(record: dict[str, JSON]) -> MetricsRecord | None:
    step = whole(record.get("step"))
    metrics = record.get("m")
    if step is None or not isinstance(metrics, dict):
        return None

    values = {}
    for name, value in metrics.items():
        number = to_number(value)
        if number is not None and len(name) <= _MAX_NAME:
            values[intern(name)] = number  # the steps share most names

    return MetricsRecord(
        step,
        time_of(record),
        whole(record.get("restart")) or 0,
        str(record.get("kind", "train")),
        values,
    )


def _span(record: dict[str, JSON] | None) -> Span | None:
    if record is None:
        return None

    start = to_number(record.get("t0"))
    end = to_number(record.get("t1"))
    if start is None or end is None or not 0 <= start <= end <= LATEST_TIME:
        return None

    step, group_id, version, restart = map(
        whole, map(record.get, ("step", "group_id", "version", "restart"))
    )
    kind = str(record.get("kind", ""))
    what = str(record.get("what", ""))
    on = record.get("on")

    return Span(
        start,
        end,
        kind,
        what,
        step,
        group_id,
        version,
        None if on is None else str(on),
        restart or 0,
    )


def _event(record: dict[str, JSON], timeline: Timeline) -> Event:
    restart = whole(record.get("restart")) or 0
    step = whole(record.get("step"))
    return Event(
        t=time_of(record),
        restart=restart,
        kind=str(record.get("kind", "info")),
        message=str(record.get("message", "")),
        step=step,
        fields={key: value for key, value in record.items() if key not in _EVENT_KEYS},
        rolled_back=step is not None and not timeline.survives(restart, step),
    )


def _sample(row: dict[str, JSON]) -> dict[str, JSON]:
    """Turn "NaN" among the scores of parts back into a number."""
    parts = row.get("reward_parts")
    if isinstance(parts, dict):
        for name, value in parts.items():
            number = to_number(value)
            if number is not None:
                parts[name] = number

    return row
