"""What the pages of `distflow dashboard` show, as JSON: the parts of a report, and what `why` and
`diff` know. Everything is read from the folders of runs; what was read is kept until a file
changes."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.commands import why
from distflow.commands.diff import differences
from distflow.commands.run_row import run_row, run_status, stamp_of, state_of
from distflow.commands.sample import find_sample
from distflow.errors import UserError
from distflow.launch.run_folders.saved_tokens import saved_tokens
from distflow.observe.crash_safe_files import to_number
from distflow.observe.findings.summary import NO_END
from distflow.observe.metrics import headline_names
from distflow.observe.report import chart_data, samples
from distflow.observe.report.build import RunPages
from distflow.observe.report.trace import trace
from distflow.observe.run_reader import read_samples, sample_files
from distflow.observe.sample_files import SAMPLES
from distflow.observe.writing.run_folder import MARK, writer_of

MAX_SAMPLES_BYTES = 8 * 2**20
MAX_PICTURE_BYTES = 2**24
_MAX_OPEN = 12
_MAX_COMPARED = 8
_MAX_DEPTH = 4
_MAX_FOUND = 10_000
_MAX_RUNS = 500
_MARKS = {MARK, "metrics.jsonl", "events.jsonl"}
_WITHOUT_END = ("running", "crashed", NO_END["word"])
"""States that change although no file does."""
_MAX_TEXT = 100_000

Query = Mapping[str, str]


class Dashboard:
    """The runs below a folder, or the run that it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._pages: dict[Path, tuple[str, RunPages]] = {}
        """By run, the last asked for at the end: its version, and what was read of it."""
        self._rows: dict[Path, tuple[str, dict[str, Any]]] = {}

    def frame(self, names: Sequence[str], of_run: str) -> dict[str, Any]:
        """What a page starts with. Raises UserError if it needs other runs than these."""
        if not of_run:
            return {"runs": []}

        runs = [self._path(name) for name in names]
        if not runs or (of_run == "one" and len(runs) > 1):
            raise UserError("This page shows a run: choose one on the page Runs, at /.")
        state = _state(runs[0], {}) if len(runs) == 1 else {}

        return {**state, "runs": list(names)}

    def answer(self, part: str, names: Sequence[str], query: Query) -> dict[str, Any]:
        """A part of a page. Raises UserError with what the reader can do."""
        paths = [self._path(name) for name in names[:_MAX_COMPARED]]
        if part == "state" and len(paths) == 1:  # which is asked all the time
            return _state(paths[0], query)

        with self._lock:
            if part == "runs":
                return self._list_runs()
            if part == "compare" and paths:
                runs = [self._read(path) for path in paths]
                return _compare(dict(zip(names, runs, strict=False)), query)
            if part in _PARTS and len(paths) == 1:
                return _PARTS[part](self._read(paths[0]), query)

        raise UserError(f"'{part}' of {len(paths)} runs is not a part of any page")

    def _path(self, name: str) -> Path:
        """Raises UserError for anything but a run's folder below the dashboard's."""
        path = self.folder / name
        is_plain = "\0" not in name and ".." not in Path(name).parts

        is_inside = is_plain and path.resolve().is_relative_to(self.folder)
        if not is_inside or not any((path / mark).exists() for mark in _MARKS):
            raise UserError(
                f"There is no run {name!r} below {self.folder}: the page Runs, at /, lists them."
            )

        return path

    def _read(self, path: Path) -> RunPages:
        version = _version(path)
        known = self._pages.pop(path, None)
        if known is None or known[0] != version:
            known = (version, RunPages(path))
        self._pages[path] = known
        if len(self._pages) > _MAX_OPEN:
            del self._pages[next(iter(self._pages))]
        return known[1]

    def _list_runs(self) -> dict[str, Any]:
        """Those written last, the last first."""
        found = self._find()
        found.sort(key=lambda path: stamp_of(path / "metrics.jsonl")[1], reverse=True)
        rows = [self._row(path) for path in found[:_MAX_RUNS]]
        return {"runs": rows, "total": len(found), "folder": str(self.folder)}

    def _find(self) -> list[Path]:
        found: list[Path] = []
        for root, below, names in os.walk(self.folder):
            path = Path(root)
            marks = _MARKS & {*names}
            if marks:
                below.clear()
                # the mark alone: a run that is starting, or a start that was refused
                if marks != {MARK} or writer_of(path) is not None:
                    found.append(path)
            elif len(path.relative_to(self.folder).parts) >= _MAX_DEPTH or len(found) >= _MAX_FOUND:
                below.clear()

        return found

    def _row(self, path: Path) -> dict[str, Any]:
        version = _version(path)
        known = self._rows.get(path)
        if known is None or known[0] != version:
            known = (version, {"run": str(path.relative_to(self.folder)), **run_row(path)})
            self._rows[path] = known
        elif known[1]["state"] in _WITHOUT_END:
            known[1]["state"] = state_of(path, NO_END)["word"]

        return known[1]


def _version(run_dir: Path) -> str:
    """Changes when the run goes on."""
    return f"{stamp_of(run_dir / 'metrics.jsonl')}{stamp_of(run_dir / 'events.jsonl')}"


def _state(run_dir: Path, query: Query) -> dict[str, Any]:
    version = _version(run_dir)
    if query.get("page") == "samples":
        version += f"{stamp_of(run_dir / SAMPLES)}"
    return {"version": version, "status": run_status(run_dir)}


def _step(run: RunPages, query: Query) -> dict[str, Any]:
    steps = [step for step in run.steps if step > 0]
    step = whole(query["step"]) if query.get("step") else max(steps, default=0)

    return {
        **why.step_page(run.run_dir, step),
        "step": step,
        "previous": max((other for other in steps if other < step), default=None),
        "next": min((other for other in steps if other > step), default=None),
    }


def _samples(run: RunPages, query: Query) -> dict[str, Any]:
    """Groups of all steps, evenly chosen, or those of one step."""
    places = {(step, split) for _, split, step in sample_files(run.run_dir)}
    split, _, step = query.get("step", "").rpartition(" ")
    chosen = (split, whole(step)) if step else None
    found = samples.thin_samples(run.run_dir, run.timeline, MAX_SAMPLES_BYTES, chosen)
    newest_first = sorted(places, key=lambda place: (-place[0], place[1]))
    return {**found, "places": [f"{split} {step}" for step, split in newest_first]}


def _group(run: RunPages, query: Query) -> dict[str, Any]:
    """One group with all that is shown of it."""
    step = whole(query.get("step", ""))
    place = whole(query.get("place", ""))
    split = query.get("split", "")

    found = samples.sample_groups(read_samples(run.run_dir, step, split), step, split)
    if place >= len(found):
        raise UserError(
            f"the samples of step {step} are not there any more: a resume may have taken it back"
        )

    group = found[place]
    return {**group, "pictures": samples.prompt_images(run.run_dir, [group], MAX_PICTURE_BYTES)}


def whole(text: str) -> int:
    """Raises UserError for anything but a whole number of 0 or more."""
    if not text.isdecimal() or len(text) > 15:
        raise UserError(f"'{text[:50]}' is not a whole number")
    return int(text)


def _sample(run: RunPages, query: Query) -> dict[str, Any]:
    uid = query.get("uid", "")
    step = query.get("step", "")

    if not uid:
        raise UserError(
            "Name a sample by its uid, such as 27570-2: the page Samples has a link for each."
        )

    found = find_sample(run.run_dir, uid, whole(step) if step else None)
    group = found.group

    facts = []
    if group is not None:
        facts += [["row", f"{group.row} of epoch {group.epoch}"], ["state", group.state]]
        if group.started is not None and group.completed is not None:
            took = group.completed - group.started
            facts.append(["generated and scored in", f"{took:.3g} s"])

    shown = samples.sample_groups([found.row], found.step, found.split, _MAX_TEXT)
    shown[0]["pictures"] = samples.prompt_images(run.run_dir, shown, MAX_PICTURE_BYTES)
    others = []
    for response in found.rows:
        others.append({"uid": response.get("uid"), "score": to_number(response.get("score"))})
    return {
        "uid": uid,
        "step": found.step,
        "split": found.split,
        "facts": facts,
        "group": shown[0],
        "others": others,
        "tokens": _tokens_of(run.run_dir, found.step, uid),
    }


def _tokens_of(run_dir: Path, step: int, uid: str) -> list[dict[str, Any]]:
    """What was saved of each token of a sample. difference: of its log-prob in training."""
    tokens = saved_tokens(run_dir, step, uid)
    for token in tokens:
        if token["trained"] is False:  # nobody drew it: it has no log-prob and no version
            token |= dict.fromkeys(("log_prob", "old", "advantage", "version"))
        token["difference"] = None
        old = token["old"]
        log_prob = token["log_prob"]
        if isinstance(old, float) and isinstance(log_prob, float):
            token["difference"] = old - log_prob
        if token["trained"] is not None:
            token["trained"] = int(token["trained"])

    return tokens


def _compare(runs: Mapping[str, RunPages], query: Query) -> dict[str, Any]:
    """The differences of the first run to another, and the headline curves of all."""
    names = list(runs)
    if len(names) < 2:
        raise UserError("Choose two to eight runs on the page Runs, at /.")

    other = query.get("against", "")
    if other not in names[1:]:
        other = names[1]
    compared = differences(runs[names[0]], runs[other])
    shown = headline_names()
    metrics = [metric for metric in compared["metrics"] if metric["metric"] in shown]
    pair = [names[0], other]

    return {**compared, "metrics": metrics, "runs": names, "pair": pair, "curves": _overlaid(runs)}


def _overlaid(runs: Mapping[str, RunPages]) -> dict[str, Any]:
    """A chart for each headline metric, with a line for each run that has it."""
    steps: dict[int, dict[str, float]] = {}
    charts = []
    for name in sorted(headline_names()):
        labels = {}
        colors = {}
        for color, (run, pages) in enumerate(runs.items()):
            line = f"{name} · {run}"
            for step, values in pages.steps.items():
                if name in values:
                    steps.setdefault(step, {})[line] = values[name]
                    labels[line] = run
                    colors[line] = color

        if labels:
            chart = {"question": name, "kind": "line", "unit": chart_data.unit_of(name)}
            charts.append({**chart, "names": list(labels), "labels": labels, "colors": colors})

    series = chart_data.series(steps)
    return {"series": series, "charts": charts, "others": [], "trials": {}, "docs": {}}


_PARTS: Mapping[str, Callable[[RunPages, Query], dict[str, Any]]] = {
    "top": lambda run, query: run.top() | {"status": run_status(run.run_dir)},
    "judged": lambda run, query: run.judged(),
    "learned": lambda run, query: run.learned(),
    "setup": lambda run, query: run.setup(),
    "time": lambda run, query: run.time(),
    "curves": lambda run, query: run.curves(),
    "step": _step,
    "samples": _samples,
    "group": _group,
    "sample": _sample,
    "trace": lambda run, query: trace(run.run_dir, query.get("step") or None)[0],
}
