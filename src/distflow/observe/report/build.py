"""Writes `report.html`: a self-contained file, which opens offline and runs only our own script."""

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from distflow.observe import run_reader
from distflow.observe.crash_safe_files import JSON, encode, read_object, write_atomically
from distflow.observe.metrics import find_metric
from distflow.observe.report import chart_data as charts
from distflow.observe.report import doctor, doctor_run_rules, domains, samples, summary_sentences
from distflow.observe.report.pipeline_graph import drawn_nodes
from distflow.observe.report.step_times import device_price, times_json
from distflow.observe.report.summary_sentences import (
    Accuracy,
    EventGroup,
    Finding,
    Steps,
    known_values,
)
from distflow.observe.report.timelines import timelines
from distflow.observe.run_reader import Event
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import RunFolderError, is_ours
from distflow.untrusted_files import MAX_YAML_BYTES, read_file

MAX_BYTES = 1_300_000
"""Size of a usual report: metrics, log and config are always included, and samples fill the
rest."""

MOST_BYTES = 5_000_000
"""Size of any report: if a folder holds more than a run writes, long texts and lists are cut until
it fits."""

HEAD = ("model", "data", "batch", "preset", "workers", "machine", "sandbox")
HIDDEN = ("experiment", "title", "changed", "config", "seal")
_PAGE_BYTES = 130_000
_LEAST_SAMPLES_BYTES = 200_000
_MAX_CONFIG = 100_000
_MAX_LOG = 300
_MAX_SENTENCES = 100
_MAX_SENTENCE = 2000
_MAX_MESSAGE = 20_000
_WITH_COLUMNS = ("series", "bars")

_PARTS = (
    *(
        "dom",
        "page_data",
        "summary_and_problems",
        "curves",
        "histograms_and_constants",
        "pipeline_graph",
        "timeline",
    ),
    *("step_times", "domains", "response_remarks", "samples", "config_and_events"),
)
SCRIPTS = (*_PARTS, "report")
POLICY_OF_SERVED_PAGES = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; "
    "base-uri 'none'; form-action 'none'"
)


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
    data = (
        run.top()
        | run.judged()
        | run.learned()
        | run.curves()
        | run.histograms()
        | run.time()
        | run.setup()
    )
    _shrink(data, MOST_BYTES - _LEAST_SAMPLES_BYTES - 3 * _PAGE_BYTES)
    room = max(MAX_BYTES - len(encode(data)) - _PAGE_BYTES, _LEAST_SAMPLES_BYTES)
    data["samples"] = samples.thin_samples(run_dir, run.timeline, room)
    return data


class RunPages(doctor_run_rules.RunRecords):
    """The data of a run's pages as JSON, in parts: each reads what it needs when it is first asked
    for."""

    def __init__(self, run_dir: Path, growing: run_reader.GrowingMetrics | None = None) -> None:
        super().__init__(run_dir, growing)
        self.run = read_object(run_dir / "run.json", run_dir)

    @cached_property
    def table(self) -> charts.Table:
        return charts.as_table(self.steps)

    @cached_property
    def trials(self) -> dict[str, int]:
        return samples.num_problems(self.run_dir, self.timeline)

    @cached_property
    def problems(self) -> list[EventGroup]:
        failed = summary_sentences.failure(self.events)
        return summary_sentences.group_events(
            [event for event in self.events if event is not failed]
        )

    @cached_property
    def accuracy(self) -> Accuracy | None:
        if doctor_run_rules.accuracy_counts_nothing(self.steps):
            return None
        return summary_sentences.find_accuracy(self.records, self.trials.get("all"), self.events)

    @cached_property
    def examination(self) -> doctor.Examination:
        return doctor.examine(self)

    def top(self) -> dict[str, Any]:
        """What ran, how it ended, and the numbers to read first."""
        run = self.run
        name = run.get("experiment") or run.get("title") or self.run_dir.resolve().name
        return {
            "title": str(name)[:_MAX_SENTENCE],
            "head": _facts(run, HEAD),
            "status": summary_sentences.status(self.events),
            "written": time.strftime("%Y-%m-%d %H:%M"),
            "tiles": tiles(self.accuracy, self.steps),
            "problems": self.problems,
            "domains": domains.domain_table(self.steps),
        }

    def judged(self) -> dict[str, Any]:
        """The findings in sentences, and what ended a run that failed."""
        failed = summary_sentences.failure(self.events)
        found = self.examination.findings
        events = self.events
        records = self.records
        planned = [
            each
            for each in found
            if each.rule == doctor_run_rules.PLANNED and each.tone == "unknown"
        ]
        found = [each for each in found if each not in planned]
        written = max(
            [event.t for event in events[-1:]] + [record.t for record in records[-1:]], default=0.0
        )
        known = None if self.growing is None else self.growing.damage
        damaged = [
            Finding("flat", f"{sentence}.")
            for sentence in run_reader.read_damage(self.run_dir, known)
        ]
        end = summary_sentences.ending(events, self.steps, self.run.get("total_steps"), written)
        judged = _judgements(end, found, self.accuracy, self.problems, self.steps)
        return {
            "failure": _failure(failed) if failed else None,
            "judgements": [f"{finding.text} {finding.advice}".rstrip() for finding in judged[:3]],
            "sentences": _sentences(judged, self.steps, events, [*planned, *damaged]),
        }

    def learned(self) -> dict[str, Any]:
        """The same validation problems before and after training."""
        return {"compare": samples.before_and_after(self.run_dir, self.timeline)}

    def curves(self) -> dict[str, Any]:
        """The charts, their columns, and what did not change."""
        found = charts.series(self.steps)
        return {**self.columns(found), **self.layout(found["y"])}

    def columns(self, series: Mapping[str, Any]) -> dict[str, Any]:
        axes = charts.axes(series["x"], self.records, _samples_of_a_step(self.run_dir))
        return {
            "series": {**series, "axes": axes},
            "bars": charts.error_bars(series["y"], self.trials),
        }

    def layout(self, y: Mapping[str, charts.Column]) -> dict[str, Any]:
        """Which charts there are, and what each metric means. y: the columns, which may be of few
        points."""
        chosen = charts.choose_charts(y, domains.domain_charts(y))
        drawn, others, constants = charts.set_constants_apart(*chosen, y)
        return {
            "charts": drawn,
            "others": others,
            "constants": constants,
            "units": {name: unit for name in others if (unit := charts.unit_of(name))},
            "docs": {name: metric.doc for name in y if (metric := find_metric(name))}
            | domains.domain_docs(y),
        }

    def histograms(self) -> dict[str, Any]:
        return {"histograms": charts.histograms(self.run_dir, self.timeline)}

    def time(self) -> dict[str, Any]:
        """How steps run."""
        return {
            "pipeline": drawn_nodes(
                read_object(self.run_dir / "plan.json", self.run_dir).get("nodes"), self.steps
            ),
            "timelines": timelines(self.activity, self.records),
            "times": times_json(self.times, device_price(self.config)),
        }

    def setup(self) -> dict[str, Any]:
        """How it was configured, and what happened."""
        run = self.run
        log = [e for e in self.events if e.kind not in summary_sentences.PROBLEM_KINDS]
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


def _samples_of_a_step(run_dir: Path) -> int | None:
    """As configured."""
    flat = run_reader.flat_config(run_dir)
    sizes = [flat.get(key, "") for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n")]
    return int(sizes[0]) * int(sizes[1]) if all(size.isdecimal() for size in sizes) else None


def _judgements(
    end: Finding,
    found: Sequence[Finding],
    accuracy: Accuracy | None,
    groups: Sequence[EventGroup],
    steps: Steps,
) -> list[Finding]:
    """The findings, most important first: how it ended, obstacles to learning, whether it learned,
    others, problems."""
    if not steps:
        return [
            each
            for each in (end, Finding("unknown", "No step has been recorded yet."))
            if each.text
        ]
    if not max(steps) and accuracy:  # an evaluation, or a run that has only validated so far
        judged = [
            end,
            *found,
            summary_sentences.describe_accuracy(accuracy),
            summary_sentences.problems(groups, steps),
        ]
        return [finding for finding in judged if finding.text]
    hindered = [finding for finding in found if finding.hinders]
    others = [finding for finding in found if not finding.hinders]
    # For a reward that never moved, `hindered` says more than "no clear change"; only validation
    # problems add to it.
    outcome = (
        [summary_sentences.describe_learning(accuracy, steps)] if accuracy or not hindered else []
    )
    if end.tone == "bad":  # after a failure, checks that passed or did not run do not matter
        outcome = [finding for finding in outcome if finding.tone != "unknown"]
    problems = (
        [] if end.tone == "bad" and not groups else [summary_sentences.problems(groups, steps)]
    )
    return [finding for finding in (end, *hindered, *outcome, *others, *problems) if finding.text]


def _sentences(
    judged: Sequence[Finding], steps: Steps, events: Sequence[Event], last: Sequence[Finding]
) -> list[dict[str, str]]:
    """The findings, then audits and times, then the last ones: what was predicted, and lost
    lines."""
    ordered = list(judged)
    if steps and max(steps):
        failed = summary_sentences.status(events)["word"] == "failed"
        ordered += (
            []
            if failed and not summary_sentences.audited(events)
            else [summary_sentences.describe_audits(events)]
        )
        ordered.append(Finding("unknown", summary_sentences.time_sentence(steps)))
    ordered += last
    return [
        {
            "tone": found.tone,
            "text": found.text[:_MAX_SENTENCE],
            "advice": found.advice[:_MAX_SENTENCE],
        }
        for found in ordered[:_MAX_SENTENCES]
        if found.text
    ]


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
    shown = {
        key: value
        for key in keys
        if isinstance(value := run.get(key), str | int | float) and value != ""
    }
    return [[key.replace("_", " "), str(value)[:500]] for key, value in shown.items()]


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
        text = json.dumps(run["config"], indent=2) if "config" in run else ""
    except OSError as error:
        text = f"(config.yaml cannot be read: {error.strerror})"
    return text[:_MAX_CONFIG]


def page(data: Mapping[str, Any]) -> bytes:
    """The template filled in with the result of `report_data`."""
    words = {"title": data["title"], "kind": "report", "status": data["status"]["word"]}
    return fill(
        "report.html", SCRIPTS, data, words, sentences="\n".join(_paragraphs(data)), plots=True
    )


def fill(
    template: str,
    scripts: Sequence[str],
    data: object,
    words: Mapping[str, str],
    sentences: str = "",
    plots: bool = False,
) -> bytes:
    """A page of the templates. words: texts that it names. sentences: markup. plots: with the
    library of curves. Only the scripts and the style with hashes in the policy may run."""
    static = files("distflow.observe.report") / "static"

    def read(name: str) -> str:
        text = (static / name).read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "</style" not in text.lower(), (
            f"{name} would end its own tag"
        )
        return text

    scripts = [read("uplot/uPlot.iife.min.js")] * plots + [
        "\n".join(read(f"{name}.js") for name in scripts)
    ]
    style = (read("uplot/uPlot.min.css") + "\n" if plots else "") + read("report.css")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src "
        f"{_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = _template(template).substitute(
        {name: _text(text) for name, text in words.items()},
        policy=html.escape(policy, quote=True).replace("&#x27;", "'"),
        sentences=sentences,
        styles=f"<style>{style}</style>",
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data=embed(data),
    )
    return filled.encode("utf-8", "backslashreplace")


def _template(name: str) -> Template:
    static = files("distflow.observe.report") / "static"
    return Template(
        (static / "head.html").read_text(encoding="utf-8")
        + (static / name).read_text(encoding="utf-8")
    )


def served_files() -> dict[str, bytes]:
    """The scripts and styles of a report, and those of a dashboard, by name."""
    static = files("distflow.observe.report") / "static"
    names = [f"{name}.js" for name in (*_PARTS, "dashboard")] + ["report.css"]
    libraries = ("uPlot.iife.min.js", "uPlot.min.css")
    return {name: (static / name).read_bytes() for name in names} | {
        name: (static / "uplot" / name).read_bytes() for name in libraries
    }


def served_page(data: Mapping[str, object], title: str) -> bytes:
    """The frame of a report whose scripts are served and ask for their data. data: what they start
    with."""
    styles = "\n".join(
        f'<link rel="stylesheet" href="/static/{name}.css">' for name in ("uPlot.min", "report")
    )
    scripts = "\n".join(
        f'<script src="/static/{name}.js"></script>'
        for name in ("uPlot.iife.min", *_PARTS, "dashboard")
    )
    words = {
        "title": _text(title),
        "kind": "dashboard",
        "status": "",
        "sentences": "",
        "data": embed(data),
    }
    words["policy"] = POLICY_OF_SERVED_PAGES
    filled = _template("report.html").substitute(words, styles=styles, scripts=scripts)
    return filled.encode("utf-8", "backslashreplace")


def _paragraphs(data: Mapping[str, Any]) -> list[str]:
    """The sentences at the top; the full error follows the first, which says how the run ended."""
    found = [
        f'<p class="{sentence["tone"]}">{_text(sentence["text"])}'
        + (
            f' <span class="advice">{_text(sentence["advice"])}</span>'
            if sentence["advice"]
            else ""
        )
        + "</p>"
        for sentence in data["sentences"]
    ]
    if data["failure"]:
        found.insert(
            1, f'<div id="failure">{html.escape(escape_control(data["failure"]["message"]))}</div>'
        )
    return found


def embed(data: object) -> str:
    """JSON that stays data inside a script tag: no "<" in it can end or open anything."""
    return encode(data).decode("utf-8").replace("<", "\\u003c")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(text: str) -> str:
    return html.escape(escape_control(text, one_line=True))


def tiles(accuracy: Accuracy | None, steps: Steps) -> list[dict[str, str]]:
    """The few numbers to read first: label, value, and a line below."""
    found = _accuracy_tiles(accuracy) if accuracy else []
    for label, name in (
        ("reward", summary_sentences.REWARD),
        ("loss", "sft/loss"),
        ("validation loss", "sft/val_loss"),
    ):
        if values := known_values(steps, name):
            found.append((label, f"{values[-1]:.3g}", f"{values[0]:.3g} at first"))
    if speeds := sorted(known_values(steps, "throughput/tokens_per_s")):
        found.append(("tokens a second", f"{speeds[len(speeds) // 2]:,.0f}", "median of the steps"))
    if seconds := known_values(steps, "timing_s/step"):
        found.append(
            ("steps", f"{len(seconds):,}", f"in {summary_sentences.readable_s(sum(seconds))}")
        )
    return [{"label": label, "value": value, "note": note} for label, value, note in found]


def _accuracy_tiles(accuracy: Accuracy) -> list[tuple[str, str, str]]:
    (first_step, first), (last_step, last) = accuracy.points[0], accuracy.points[-1]
    where = "before RL" if accuracy.before_training else f"at step {first_step}"
    found = [(f"accuracy {where}", f"{first:.2f}", _likely(accuracy, first))]
    if len(accuracy.points) > 1:
        best_step, best = accuracy.best
        found.append((f"accuracy at step {last_step}", f"{last:.2f}", _likely(accuracy, last)))
        if best > last:
            found.append(("best accuracy", f"{best:.2f}", f"at step {best_step}"))
    return found


def _likely(accuracy: Accuracy, share: float) -> str:
    """The confidence interval of the accuracy, if it is a share of a known number."""
    if not accuracy.num_problems or not 0 <= share <= 1:
        return "on validation problems"
    low, high = charts.wilson(share, accuracy.num_problems)
    return f"95 %: {low:.2f} to {high:.2f}"
