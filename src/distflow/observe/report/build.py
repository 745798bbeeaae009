"""Writes `report.html`: a self-contained file, which opens offline and runs only our own script."""

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from distflow.observe import run_reader
from distflow.observe.crash_safe_files import JSON, encode, read_object, write_atomically
from distflow.observe.findings import summary
from distflow.observe.findings.doctor import Examination, examine
from distflow.observe.findings.finding import Finding
from distflow.observe.findings.headline import MAX_SENTENCE, judgements, sentences, tiles
from distflow.observe.findings.learning_rules import accuracy_counts_nothing
from distflow.observe.findings.summary import Accuracy, EventGroup
from distflow.observe.metrics import find_metric
from distflow.observe.report import chart_data as charts
from distflow.observe.report import samples
from distflow.observe.report.page import PAGE_BYTES, page
from distflow.observe.report.step_times import times_json
from distflow.observe.report.validations import (
    Ends,
    before_and_after,
    num_problems,
    read_validations,
)
from distflow.observe.run_reader import Event
from distflow.observe.run_records import RunRecords
from distflow.observe.writing.run_folder import RunFolderError, is_ours
from distflow.untrusted_files import MAX_YAML_BYTES, read_file

MAX_BYTES = 1_300_000
"""Size of a usual report: metrics, log and config are always included, and samples fill the
rest."""

MOST_BYTES = 5_000_000
"""Size of any report: if a folder holds more than a run writes, long texts and lists are cut until
it fits."""

HEAD = ("model", "data", "batch", "preset", "workers", "machine", "sandbox")
HIDDEN = ("experiment", "title", "changed", "config")
_LEAST_SAMPLES_BYTES = 200_000
_MAX_CONFIG = 100_000
_MAX_LOG = 300
_MAX_MESSAGE = 20_000
_WITH_COLUMNS = ("series", "bars")


def write_report(run_dir: Path, data: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into the run's folder and return its path; works during the run and after
    a crash.

    data: the result of `report_data`, if known. The report lists missing files. Raises
    RunFolderError if there is no such folder, or it is not a run's; UserError for an unreadable
    file.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunFolderError(f"there is no folder {run_dir}: name the run's folder")
    if not is_ours(run_dir):
        raise RunFolderError(
            f"{run_dir} is not a run's folder (no files of distflow); nothing was written"
        )

    path = run_dir / "report.html"
    content = page(report_data(run_dir) if data is None else data)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise RunFolderError(f"the report {path} cannot be written: {error.strerror}") from error

    return path


def report_data(run_dir: Path) -> dict[str, Any]:
    """Everything that the page shows, as JSON data; parts missing in the run's folder are empty.
    Samples fill the space that the rest leaves."""
    run = RunPages(run_dir)
    data = run.top() | run.judged() | run.learned() | run.curves() | run.time() | run.setup()
    _shrink(data, MOST_BYTES - _LEAST_SAMPLES_BYTES - 3 * PAGE_BYTES)
    room = max(MAX_BYTES - len(encode(data)) - PAGE_BYTES, _LEAST_SAMPLES_BYTES)
    data["samples"] = samples.thin_samples(run_dir, run.timeline, room)
    return data


class RunPages(RunRecords):
    """The data of a run's pages as JSON, in parts."""

    @cached_property
    def run(self) -> dict[str, JSON]:
        return read_object(self.run_dir / "run.json", self.run_dir)

    @cached_property
    def validations(self) -> list[Ends]:
        return read_validations(self.run_dir, self.timeline)

    @cached_property
    def problems(self) -> list[EventGroup]:
        failed = summary.failure(self.events)
        return summary.group_events([event for event in self.events if event is not failed])

    @cached_property
    def accuracy(self) -> Accuracy | None:
        if accuracy_counts_nothing(self.steps):
            return None
        number = num_problems(self.validations).get("all")
        return summary.find_accuracy(self.records, number, self.events)

    @cached_property
    def examination(self) -> Examination:
        return examine(self)

    def top(self) -> dict[str, Any]:
        """What ran, how it ended, and the numbers to read first."""
        run = self.run
        name = run.get("experiment") or run.get("title") or self.run_dir.resolve().name
        return {
            "title": str(name)[:MAX_SENTENCE],
            "head": _facts(run, HEAD),
            "status": summary.status(self.events),
            "written": time.strftime("%Y-%m-%d %H:%M"),
            "tiles": tiles(self.accuracy, self.steps),
            "problems": self.problems,
        }

    def judged(self) -> dict[str, Any]:
        """The findings in sentences, and what ended a run that failed."""
        failed = summary.failure(self.events)
        found = self.examination.findings
        events = self.events
        records = self.records
        written = max(
            [event.t for event in events[-1:]] + [record.t for record in records[-1:]], default=0.0
        )
        damage = run_reader.read_damage(self.run_dir)
        damaged = [Finding("flat", f"{sentence}.") for sentence in damage]
        end = summary.ending(events, self.steps, self.run.get("total_steps"), written)
        judged = judgements(end, found, self.accuracy, self.problems, self.steps)

        return {
            "failure": _failure(failed) if failed else None,
            "judgements": [f"{finding.text} {finding.advice}".rstrip() for finding in judged[:3]],
            "sentences": sentences(judged, self.steps, events, damaged),
        }

    def learned(self) -> dict[str, Any]:
        """The same validation problems before and after training."""
        return {"compare": before_and_after(self.validations)}

    def curves(self) -> dict[str, Any]:
        """The charts, their columns, and what each metric means."""
        series = charts.series(self.steps)
        columns = series["y"]
        drawn, others = charts.choose_charts(columns)

        docs = {}
        for name in columns:
            if metric := find_metric(name):
                docs[name] = metric.doc

        return {
            "series": series,
            "trials": num_problems(self.validations),
            "charts": drawn,
            "others": others,
            "units": {name: charts.unit_of(name) for name in others},
            "docs": docs,
        }

    def time(self) -> dict[str, Any]:
        """Where the time of steps goes."""
        return {"times": times_json(self.times)}

    def setup(self) -> dict[str, Any]:
        """How it was configured, and what happened."""
        run = self.run
        log = [e for e in self.events if e.kind not in summary.PROBLEM_KINDS]
        shown = [
            key for key in run if key not in (*HEAD, *HIDDEN) and not key.endswith("fingerprint")
        ]

        return {
            "facts": _facts(run, shown),
            "log": [_log_line(event) for event in log][-_MAX_LOG:],
            "preset": str(run.get("preset", "")),
            "changed": _changed(run),
            "config": _config_text(self.run_dir, run),
        }


def _shrink(data: dict[str, Any], max_bytes: int) -> None:
    """Repeatedly cut the largest part until everything fits, except columns, whose number is
    bounded."""
    sizes = {name: samples.embedded_size(value) for name, value in data.items()}
    limits = dict.fromkeys(sizes, max_bytes)
    while sum(sizes.values()) > max_bytes:
        name = max(
            (name for name in sizes if name not in _WITH_COLUMNS and limits[name]),
            key=sizes.__getitem__,
        )
        limits[name] //= 2
        data[name] = samples.cut(data[name], limits[name], limits[name])
        sizes[name] = samples.embedded_size(data[name])


def _failure(error: Event) -> dict[str, str]:
    trace = error.fields.get("traceback")
    message = str(
        samples.cut(error.message.removeprefix(f"{error.fields.get('raised')}: "), _MAX_MESSAGE)
    )
    return {"message": message, "traceback": trace if isinstance(trace, str) else ""}


def _facts(run: Mapping[str, JSON], keys: Sequence[str]) -> list[list[str]]:
    """The plain values of run.json, as readable text."""
    facts = []
    for key in keys:
        value = run.get(key)
        if isinstance(value, str | int | float) and value != "":
            facts.append([key.replace("_", " "), str(value)[:500]])
    return facts


def _changed(run: Mapping[str, JSON]) -> list[dict[str, str]] | None:
    """The keys whose values differ from the preset's; None if the run did not record them."""
    changed = run.get("changed")
    if not isinstance(changed, list):
        return None

    keys = ("key", "before", "now", "where")
    return [
        {key: str(change.get(key, ""))[:1000] for key in keys}
        for change in changed
        if isinstance(change, dict)
    ]


def _log_line(event: Event) -> dict[str, object]:
    message = event.message[:2000]
    return {
        "t": event.t,
        "kind": event.kind,
        "message": message,
        "step": event.step,
        "rolled_back": event.rolled_back,
    }


def _config_text(run_dir: Path, run: Mapping[str, JSON]) -> str:
    try:
        text = read_file(run_dir / "config.yaml", run_dir, MAX_YAML_BYTES).decode(
            "utf-8", "replace"
        )
    except FileNotFoundError:
        text = ""
        if "config" in run:
            text = json.dumps(run["config"], indent=2)
    except OSError as error:
        text = f"(config.yaml cannot be read: {error.strerror})"

    return text[:_MAX_CONFIG]
