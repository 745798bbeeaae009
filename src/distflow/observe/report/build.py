"""Writes `report.html`: one file with everything inside, which opens offline and runs nothing but our own script."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from distflow.observe.files import JSON, encode, write_atomically
from distflow.observe.reading.run_reader import (
    Event,
    read_config,
    read_damage,
    read_events,
    read_json,
    read_metrics,
    read_timeline,
)
from distflow.observe.report.charts import (
    ChosenChart,
    Constant,
    Histogram,
    Series,
    choose_charts,
    describe,
    histograms,
    series,
    set_constants_apart,
    tabulate,
    unit_of,
)
from distflow.observe.report.domains import Domain, domain_charts, domain_docs, domain_table
from distflow.observe.report.findings import Finding, accuracy_counts_nothing, findings, idle_sides
from distflow.observe.report.page import page, tiles
from distflow.observe.report.pipeline import DrawnNode, pipeline_graph
from distflow.observe.report.samples import Samples, before_and_after, num_problems, thin_samples
from distflow.observe.report.summary import (
    Accuracy,
    EventGroup,
    Steps,
    Tone,
    describe_audits,
    describe_learning,
    ending,
    failure,
    find_accuracy,
    group_events,
    has_audits,
    problems,
    status,
    time_sentence,
)
from distflow.observe.report.timeline import StepTimeline, error_bars, read_activity, timelines
from distflow.observe.writing.folder_lock import RunFolderError, is_ours

MAX_BYTES = 1_300_000
"""Of a usual report: metrics, log and config are in it whatever they take, and samples fill the rest."""

HEAD = ("model", "data", "batch", "preset", "workers", "machine", "sandbox")
HIDDEN = ("experiment", "title", "changed", "config")
_PAGE_BYTES = 130_000
_LEAST_SAMPLES_BYTES = 200_000
_MAX_CONFIG = 100_000
_MAX_LOG = 300


class ReportData(TypedDict):
    """Everything that the page shows, as JSON data. samples: as of `thin_samples`, in the room that the rest leaves."""

    title: str
    head: list[list[str]]
    facts: list[list[str]]
    status: dict[str, str]
    written: str
    failure: dict[str, str] | None
    sentences: list[dict[str, str]]
    tiles: list[dict[str, str]]
    problems: list[EventGroup]
    log: list[dict[str, object]]
    compare: dict[str, object] | None
    domains: list[Domain]
    series: Series
    bars: dict[str, list[list[float] | None]]
    charts: list[ChosenChart]
    others: list[str]
    constants: list[Constant]
    units: dict[str, str]
    docs: dict[str, str]
    histograms: list[Histogram]
    pipeline: list[DrawnNode]
    timelines: list[StepTimeline]
    preset: str
    changed: list[dict[str, str]] | None
    config: str
    samples: NotRequired[Samples]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run's folder and return its path; works while the run is going and after a crash.

    What is missing in it is missing in the report, and said. Raises RunFolderError if there is no such folder, or it is
    somebody's; UserError for a file that may not be read.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunFolderError(f"there is no run's folder at {run_dir}")
    if not is_ours(run_dir):
        raise RunFolderError(f"{run_dir} is no run's folder: what it holds is not of distflow, and nothing is written")
    path, content = run_dir / "report.html", page(report_data(run_dir))
    try:
        write_atomically(path, content)
    except OSError as error:
        raise RunFolderError(f"the report {path} cannot be written: {error.strerror}") from error
    return path


def report_data(run_dir: Path) -> ReportData:
    """Read the run's folder; what is missing in it is empty here."""
    timeline = read_timeline(run_dir)
    records, events = read_metrics(run_dir, timeline), read_events(run_dir, timeline)
    steps = tabulate(records)
    trials = num_problems(run_dir, timeline)
    accuracy = find_accuracy(records, trials.get("all"))
    failed = failure(events)
    groups = group_events([event for event in events if failed is None or event is not failed["event"]])
    columns = series(steps)
    charts, others, constants = set_constants_apart(
        *choose_charts(columns["y"], domain_charts(columns["y"])), columns["y"]
    )
    run, config = read_json(run_dir, "run.json"), read_config(run_dir)
    activity = read_activity(run_dir)
    found = [*findings(run_dir, timeline, steps, config), *idle_sides(activity, config)]
    counted = None if accuracy_counts_nothing(steps) else accuracy
    written = max([event.t for event in events[-1:]] + [record.t for record in records[-1:]], default=0.0)
    end = ending(events, failed, steps, run.get("total_steps"), written)
    data: ReportData = {
        "title": str(run.get("experiment") or run.get("title") or run_dir.resolve().name),
        "head": _facts(run, HEAD),
        "facts": _facts(run, [key for key in run if key not in (*HEAD, *HIDDEN) and not key.endswith("fingerprint")]),
        "status": status(events),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "failure": {"message": failed["message"], "traceback": failed["traceback"]} if failed else None,
        "sentences": [*_sentences(end, found, counted, groups, steps, events), *_damage(run_dir)],
        "tiles": tiles(counted, steps),
        "problems": groups,
        "log": [_log_line(event) for event in events if event.kind not in ("warning", "error", "finding")][-_MAX_LOG:],
        "compare": before_and_after(run_dir, timeline),
        "domains": domain_table(steps),
        "series": columns,
        "bars": error_bars(columns["y"], trials),
        "charts": charts,
        "others": others,
        "constants": constants,
        "units": {name: unit for name in others if (unit := unit_of(name))},
        "docs": describe(columns["y"]) | domain_docs(columns["y"]),
        "histograms": histograms(run_dir, timeline),
        "pipeline": pipeline_graph(run_dir, steps),
        "timelines": timelines(activity, records),
        "preset": str(run.get("preset", "")),
        "changed": _changed(run),
        "config": _config_text(run_dir, run),
    }
    used = len(encode(data))
    data["samples"] = thin_samples(run_dir, timeline, max(MAX_BYTES - used - _PAGE_BYTES, _LEAST_SAMPLES_BYTES))
    return data


def _sentences(
    end: tuple[Tone, str],
    found: Sequence[Finding],
    accuracy: Accuracy | None,
    groups: Sequence[EventGroup],
    steps: Steps,
    events: Sequence[Event],
) -> list[dict[str, str]]:
    """The most important first: how it ended, what kept it from learning, whether it learned, what else there is."""
    said: list[Finding] = [Finding(*end)]
    if not steps:
        said.append(Finding("unknown", "No step has been recorded yet."))
    else:
        hindered = [finding for finding in found if finding.hinders]
        others = [finding for finding in found if not finding.hinders]
        # Of a reward that never moved `hindered` says more than "no clear change"; only validation problems add to
        # that.
        outcome = [Finding(*describe_learning(accuracy, steps))] if accuracy or not hindered else []
        rest = [Finding(*problems(groups, steps)), Finding(*describe_audits(events))]
        if end[0] == "bad":  # beside a failure it is no matter what did not go wrong, or was not begun
            outcome = [finding for finding in outcome if finding.tone != "unknown"]
            rest = [finding for finding, counts in zip(rest, (groups, has_audits(events)), strict=True) if counts]
        said += [*hindered, *outcome, *others, *rest, Finding("unknown", time_sentence(steps))]
    return [{"tone": tone, "text": text, "advice": advice} for tone, text, advice, _ in said if text]


def _damage(run_dir: Path) -> list[dict[str, str]]:
    return [{"tone": "flat", "text": f"{sentence}.", "advice": ""} for sentence in read_damage(run_dir)]


def _facts(run: Mapping[str, JSON], keys: Sequence[str]) -> list[list[str]]:
    """The plain values of run.json, for people."""
    shown = {key: value for key in keys if isinstance(value := run.get(key), str | int | float) and value != ""}
    return [[key.replace("_", " "), str(value)[:500]] for key, value in shown.items()]


def _changed(run: Mapping[str, JSON]) -> list[dict[str, str]] | None:
    """What the config says differently from its preset; None where the run did not write that down."""
    changed = run.get("changed")
    if not isinstance(changed, list):
        return None
    keys = ("key", "before", "now", "where")
    return [{key: str(change.get(key, ""))[:1000] for key in keys} for change in changed if isinstance(change, dict)]


def _log_line(event: Event) -> dict[str, object]:
    message = event.message[:2000]
    return {"t": event.t, "kind": event.kind, "message": message, "step": event.step, "rolled_back": event.rolled_back}


def _config_text(run_dir: Path, run: Mapping[str, JSON]) -> str:
    try:
        text = (run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = json.dumps(run["config"], indent=2) if "config" in run else ""
    except OSError as error:
        text = f"(config.yaml cannot be read: {error.strerror})"
    return text[:_MAX_CONFIG]
