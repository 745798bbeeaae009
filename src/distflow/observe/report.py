"""Writes `report.html`: one file with everything inside, which opens offline and runs nothing but our own script."""

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NotRequired, TypedDict

from distflow.observe.claim import RunFolderError, is_ours
from distflow.observe.files import write_atomically
from distflow.observe.jsonlines import JSON, encode
from distflow.observe.report_charts import ChosenChart, Series, choose_charts, describe, series, tabulate
from distflow.observe.report_samples import before_and_after, num_problems, thin_samples
from distflow.observe.report_summary import (
    REWARD,
    Accuracy,
    EventGroup,
    Steps,
    find_accuracy,
    group_events,
    learned,
    problems,
    proven,
    readable_s,
    status,
    time_sentence,
)
from distflow.observe.run_reader import Event, read_damage, read_events, read_json, read_metrics, read_timeline
from distflow.observe.text import visible

MAX_BYTES = 2_000_000
SCRIPTS = ("text.js", "top.js", "curves.js", "samples.js", "report.js")
_MAX_CONFIG = 100_000
_MAX_LOG = 300


class ReportData(TypedDict):
    """Everything that the page shows, as JSON data. samples: as of `thin_samples`, in the room that the rest leaves."""

    title: str
    run: list[list[str]]
    status: dict[str, str]
    written: str
    sentences: list[dict[str, str]]
    tiles: list[dict[str, str]]
    problems: list[EventGroup]
    log: list[dict[str, object]]
    compare: dict[str, object] | None
    series: Series
    charts: list[ChosenChart]
    others: list[str]
    docs: dict[str, str]
    config: str
    samples: NotRequired[dict[str, object]]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run's folder and return its path; works while the run goes on and after a crash.

    What is missing in it is missing in the report, and said. Raises RunFolderError if there is no such folder, or it is
    somebody's; UserError for a file that may not be read.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunFolderError(f"there is no run's folder at {run_dir}")
    if not is_ours(run_dir):
        raise RunFolderError(f"{run_dir} is no run's folder: what it holds is not of distflow, and nothing is written")
    path, page = run_dir / "report.html", _page(report_data(run_dir))
    try:
        write_atomically(path, page)
    except OSError as error:
        raise RunFolderError(f"the report {path} cannot be written: {error.strerror}") from error
    return path


def report_data(run_dir: Path) -> ReportData:
    """Read the run's folder; what is missing in it is empty here."""
    timeline = read_timeline(run_dir)
    records, events = read_metrics(run_dir, timeline), read_events(run_dir, timeline)
    steps = tabulate(records)
    accuracy = find_accuracy(records, num_problems(run_dir, timeline))
    groups = group_events(events)
    columns = series(steps)
    charts, others = choose_charts(columns["y"])
    run = read_json(run_dir, "run.json")
    data: ReportData = {
        "title": str(run.get("experiment") or run.get("title") or run_dir.resolve().name),
        "run": _facts(run),
        "status": status(events),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "sentences": [*_sentences(accuracy, groups, steps, events), *_damage(run_dir)],
        "tiles": _tiles(accuracy, steps),
        "problems": groups,
        "log": [_log_line(event) for event in events if event.kind not in ("warning", "error", "finding")][-_MAX_LOG:],
        "compare": before_and_after(run_dir, timeline),
        "series": columns,
        "charts": charts,
        "others": others,
        "docs": describe(columns["y"]),
        "config": _config_text(run_dir, run),
    }
    used = len(encode(data))
    data["samples"] = thin_samples(run_dir, timeline, max(MAX_BYTES - used - 400_000, 200_000))
    return data


def _sentences(
    accuracy: Accuracy | None, groups: Sequence[EventGroup], steps: Steps, events: Sequence[Event]
) -> list[dict[str, str]]:
    if not steps:
        return [{"tone": "unknown", "text": "No step has been recorded yet."}]
    sentences = [learned(accuracy, steps), problems(groups, steps), proven(events), ("unknown", time_sentence(steps))]
    return [{"tone": tone, "text": text} for tone, text in sentences if text]


def _damage(run_dir: Path) -> list[dict[str, str]]:
    return [{"tone": "flat", "text": f"{sentence}."} for sentence in read_damage(run_dir)]


def _tiles(accuracy: Accuracy | None, steps: Steps) -> list[dict[str, str]]:
    """The few numbers to read first: label, value, and a line below."""
    tiles = []
    if accuracy:
        (first_step, first), (last_step, last) = accuracy.points[0], accuracy.points[-1]
        where = "before RL" if accuracy.before_training else f"at step {first_step}"
        best_step, best = accuracy.best
        tiles.append(_tile(f"accuracy {where}", f"{first:.2f}", f"step {first_step}"))
        if len(accuracy.points) > 1:
            tiles.append(
                _tile("accuracy after", f"{last:.2f}", f"{round(last, 2) - round(first, 2):+.2f} at step {last_step}")
            )
            tiles.append(_tile("best accuracy", f"{best:.2f}", f"at step {best_step}"))
    rewards = [(s, v[REWARD]) for s, v in sorted(steps.items()) if math.isfinite(v.get(REWARD, math.nan))]
    if rewards:
        tiles.append(_tile("reward", f"{rewards[-1][1]:.3g}", f"{rewards[0][1]:.3g} at step {rewards[0][0]}"))
    speeds = sorted(
        v for values in steps.values() if math.isfinite(v := values.get("throughput/tokens_per_s", math.nan))
    )
    if speeds:
        tiles.append(_tile("tokens a second", f"{speeds[len(speeds) // 2]:,.0f}", "median of the steps"))
    seconds = [values["timing_s/step"] for values in steps.values() if "timing_s/step" in values]
    if seconds and math.isfinite(sum(seconds)):
        tiles.append(_tile("steps", f"{len(seconds):,}", readable_s(sum(seconds))))
    return tiles


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _facts(run: Mapping[str, JSON]) -> list[list[str]]:
    """The plain values of run.json, for the header."""
    shown = {key: value for key, value in run.items() if isinstance(value, str | int | float) and value != ""}
    hidden = ("experiment", "title", *(key for key in shown if key.endswith("fingerprint")))
    return [[key.replace("_", " "), str(value)[:500]] for key, value in shown.items() if key not in hidden]


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


def _page(data: ReportData) -> bytes:
    """The template filled in. Only the two scripts and the style with the hashes named in the policy may act."""
    static = files("distflow.observe") / "static"

    def read(name: str) -> str:
        text = (static / name).read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "</style" not in text.lower(), f"{name} would end its own tag"
        return text

    plot = read("uplot/uPlot.iife.min.js")
    script = "\n".join(read(name) for name in SCRIPTS)
    style = read("uplot/uPlot.min.css") + "\n" + read("report.css")
    policy = (
        f"default-src 'none'; script-src {_hash(plot)} {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = Template((static / "report.html").read_text(encoding="utf-8")).substitute(
        policy=html.escape(policy, quote=True).replace("&#x27;", "'"),
        title=_text(data["title"]),
        status=_text(data["status"]["word"]),
        sentences="\n".join(f'<p class="{s["tone"]}">{_text(s["text"])}</p>' for s in data["sentences"]),
        style=style,
        plot=plot,
        script=script,
        data=embed(data),
    )
    return filled.encode("utf-8", "backslashreplace")


def embed(data: object) -> str:
    """JSON that stays data inside a script tag: no "<" in it can end or open anything."""
    return encode(data).decode("utf-8").replace("<", "\\u003c")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(text: str) -> str:
    return html.escape(visible(text, one_line=True))
