"""What the pages of `distflow dashboard` show, as JSON: the parts of a report, and what `why`,
`doctor` and `diff` know. Everything is read from the folders of runs; what was read is kept until a
file changes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.commands import why
from distflow.commands.diff import differences
from distflow.commands.run_row import TAIL_BYTES, run_row, stamp_of, state_of
from distflow.commands.sample import find_sample
from distflow.errors import UserError
from distflow.launch.run_folders.saved_tokens import saved_tokens
from distflow.observe.crash_safe_files import to_number
from distflow.observe.findings.summary import NO_END, status
from distflow.observe.metrics import headline_names
from distflow.observe.report import chart_data, samples
from distflow.observe.report.build import RunPages
from distflow.observe.report.trace import trace
from distflow.observe.run_reader import (
    read_events,
    read_samples,
    sample_files,
)
from distflow.observe.sample_files import SAMPLES
from distflow.observe.writing.run_folder import MARK

MAX_SAMPLES_BYTES = 8 * 2**20
MAX_PICTURE_BYTES = 2**24
RUNS_OF_PAGE = 50
_MAX_OPEN = 4
_MAX_COMPARED = 8
_MAX_DEPTH = 4
_MAX_RUNS = 10_000
_MARKS = {MARK, "metrics.jsonl", "events.jsonl"}
_MAX_TEXT = 100_000


class OpenRun:
    """A run that somebody looks at: what was read of it, until a file changes."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._version = ""
        self._pages: RunPages | None = None

    @property
    def version(self) -> str:
        """Changes when the run goes on."""
        return ".".join(
            map(str, (stamp_of(self.run_dir / name) for name in ("metrics.jsonl", "events.jsonl")))
        )

    def pages(self) -> RunPages:
        with self._lock:
            version = self.version
            if self._pages is None or version != self._version:
                self._pages = RunPages(self.run_dir)
                self._version = version
            return self._pages


class Dashboard:
    """The runs below a folder, or the run that it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        self._rows: dict[Path, tuple[object, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def frame(self, names: Sequence[str], of_run: str) -> dict[str, Any]:
        """What a page starts with. Raises UserError if it needs other runs than these."""
        runs = [self._path(name) for name in names] if of_run else []
        if of_run == "one" and len(runs) != 1 or of_run and not runs:
            raise UserError("This page shows a run: choose one on the page Runs, at /.")
        one = _state(self._opened(runs[0]), {}) if len(runs) == 1 else {}
        return {**one, "runs": list(names) if of_run else []}

    def answer(self, part: str, names: Sequence[str], query: Mapping[str, str]) -> dict[str, Any]:
        """A part of a page. Raises UserError with what the reader can do."""
        if part == "runs":
            return self._runs(query)
        runs = [self._opened(self._path(name)) for name in names[:_MAX_COMPARED]]
        if part in _OF_SEVERAL and runs:
            return _OF_SEVERAL[part](dict(zip(names, runs, strict=False)), query)
        if part not in _OF_ONE or len(runs) != 1:
            raise UserError(f"'{part}' of {len(runs)} runs is not a part of any page")
        return _OF_ONE[part](runs[0], query)

    def _path(self, name: str) -> Path:
        """Raises UserError for anything but a run's folder below the dashboard's."""
        path = self.folder / name
        inside = (
            "\0" not in name
            and path.resolve().is_relative_to(self.folder)
            and ".." not in Path(name).parts
        )
        if not inside or not path.is_dir() or not any((path / mark).exists() for mark in _MARKS):
            raise UserError(
                f"There is no run {name!r} below {self.folder}: the page Runs, at /, lists them."
            )
        return path

    def _opened(self, path: Path) -> OpenRun:
        with self._lock:
            if path not in self._open:
                self._open[path] = OpenRun(path)
                if len(self._open) > _MAX_OPEN + _MAX_COMPARED:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]

    def _runs(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the runs, those written last first."""
        found = sorted(
            ((stamp_of(path / "metrics.jsonl")[1], path) for path in self._find()), reverse=True
        )
        words = query.get("text", "").lower().split()
        start = RUNS_OF_PAGE * whole(query.get("page", "0"))
        chosen = [path for _, path in found if all(self._fits(path, word) for word in words)]
        hint = (
            "No run is there: `distflow train` writes into runs/, and a folder can be named after "
            "`dashboard`"
        )
        note = "" if chosen else "None of them fits" if found else hint
        rows = [self._row(path) for path in chosen[start : start + RUNS_OF_PAGE]]
        return {
            "runs": rows,
            "total": len(chosen),
            "of_page": RUNS_OF_PAGE,
            "folder": str(self.folder),
            "note": note,
        }

    def _fits(self, path: Path, word: str) -> bool:
        """Whether a run's name or state has the word."""
        return word in self._name(path).lower() or word in self._row(path)["state"]

    def _find(self) -> list[Path]:
        found: list[Path] = []
        for root, below, names in os.walk(self.folder):
            path = Path(root)
            if _MARKS & {*names}:
                found.append(path)
                below.clear()
            elif len(path.relative_to(self.folder).parts) >= _MAX_DEPTH or len(found) >= _MAX_RUNS:
                below.clear()
        return found

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def _row(self, path: Path) -> dict[str, Any]:
        stamp = (stamp_of(path / "metrics.jsonl"), stamp_of(path / "events.jsonl"))
        known = self._rows.get(path)
        if known is None or known[0] != stamp:
            known = self._rows[path] = (stamp, {"run": self._name(path), **run_row(path)})
        return known[1] | (
            {"state": state_of(path, NO_END)["word"]} if known[1]["state"] == NO_END["word"] else {}
        )


Query = Mapping[str, str]


def _state(run: OpenRun, query: Query) -> dict[str, Any]:
    version = run.version
    if query.get("page") == "samples":
        version += f".{stamp_of(run.run_dir / SAMPLES)}"
    return {"version": version, "status": _status(run)}


def _status(run: OpenRun) -> dict[str, str]:
    return state_of(run.run_dir, status(read_events(run.run_dir, None, TAIL_BYTES)))


def _step(run: OpenRun, query: Query) -> dict[str, Any]:
    pages = run.pages()
    known = sorted(
        step for step, values in pages.steps.items() if "timing_s/step" in values or step > 0
    )
    step = whole(text) if (text := query.get("step", "")) else max(known, default=0)
    content: dict[str, Any] = {"step": step, "head": [], "slowest": ""}
    content |= {"groups": [], "dropped_note": "", "dropped": []}
    try:
        found = why.step_content(run.run_dir, step)
        content |= {
            name: getattr(found, name)
            for name in ("head", "slowest", "groups", "dropped_note", "dropped")
        }
    except UserError as error:  # the time line may be there
        content["head"] = [str(error)]
    return content | {
        "previous": max((each for each in known if each < step), default=None),
        "next": min((each for each in known if each > step), default=None),
    }


def _samples(run: OpenRun, query: Query) -> dict[str, Any]:
    """Groups of all steps, evenly chosen, or those of one step."""
    timeline = run.pages().timeline
    files = {(split, step) for _, split, step in sample_files(run.run_dir)}
    places = sorted(files, key=lambda place: (-place[1], place[0]))
    split, _, step = query.get("step", "").rpartition(" ")
    if step:
        found = samples.samples_of_step(
            run.run_dir, timeline, split, whole(step), MAX_SAMPLES_BYTES
        )
    else:
        found = samples.thin_samples(run.run_dir, timeline, MAX_SAMPLES_BYTES)
    return {**found, "places": [f"{split} {step}" for split, step in places]}


def _group(run: OpenRun, query: Query) -> dict[str, Any]:
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


def _sample(run: OpenRun, query: Query) -> dict[str, Any]:
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
    for each in found.rows:
        others.append({"uid": each.get("uid"), "score": to_number(each.get("score"))})
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


def _compare(runs: Mapping[str, OpenRun], query: Query) -> dict[str, Any]:
    """The differences of the first run to another, and the headline curves of all."""
    names = list(runs)
    if len(names) < 2:
        raise UserError("Choose two to eight runs on the page Runs, at /.")
    other = query.get("against") if query.get("against") in names[1:] else names[1]
    found = differences(runs[names[0]].pages(), runs[str(other)].pages())
    shown = headline_names()
    metrics = [each for each in found["metrics"] if each["metric"] in shown]
    return {
        **found,
        "metrics": metrics,
        "runs": names,
        "pair": [names[0], other],
        "curves": _overlaid(runs),
    }


def _overlaid(runs: Mapping[str, OpenRun]) -> dict[str, Any]:
    """A chart for each headline metric, with a line for each run that has it."""
    steps: dict[int, dict[str, float]] = {}
    labels: dict[str, dict[str, str]] = {}
    shown = headline_names()
    for run, opened in runs.items():
        for step, values in opened.pages().steps.items():
            for name in shown & values.keys():
                line = f"{name} · {run}"
                steps.setdefault(step, {})[line] = values[name]
                labels.setdefault(name, {})[line] = run
    order = list(runs)
    charts = []
    for name, own in sorted(labels.items()):
        if len(steps) > 1:
            charts.append(
                {
                    "question": name,
                    "kind": "line",
                    "unit": chart_data.unit_of(name),
                    "names": list(own),
                    "labels": own,
                    "colors": {line: order.index(run) for line, run in own.items()},
                }
            )
    return {
        "series": chart_data.series(steps),
        "charts": charts,
        "others": [],
        "bars": {},
        "docs": {},
    }


_OF_SEVERAL: Mapping[str, Callable[[Mapping[str, OpenRun], Query], dict[str, Any]]] = {
    "compare": _compare,
}
_OF_ONE: Mapping[str, Callable[[OpenRun, Query], dict[str, Any]]] = {
    "state": _state,
    "top": lambda run, query: run.pages().top() | {"status": _status(run)},
    "judged": lambda run, query: run.pages().judged(),
    "learned": lambda run, query: run.pages().learned(),
    "setup": lambda run, query: run.pages().setup(),
    "time": lambda run, query: run.pages().time(),
    "curves": lambda run, query: run.pages().curves(),
    "step": _step,
    "samples": _samples,
    "group": _group,
    "sample": _sample,
    "trace": lambda run, query: trace(run.run_dir, query.get("step") or None)[0],
}
