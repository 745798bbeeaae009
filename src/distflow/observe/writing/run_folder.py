"""The writer of a run's folder. `run_reader` reads it; `docs/observe.md` describes every file.

Also moves an earlier run of the folder aside, whole, into `earlier/N`.
"""

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from distflow.observe.crash_safe_files import LineFile, encode, write_atomically
from distflow.observe.metrics import nest
from distflow.observe.writing.folder_lock import FILES, FOLDERS, MARK, claimed

EARLIER: Final = "earlier"
_NOT_MOVED: Final = (EARLIER, "data", "models")
"""Not moved: the next run may be reading them. Names of the files in them follow from their content."""

_MOVING: Final = ".moving"


def set_aside(run_dir: Path) -> Path | None:
    """Move a run's files to a folder of their own, so that another starts with an empty account.

    Returns that folder, which is a run's folder; None where there was no run. For who has claimed `run_dir`. A kill
    leaves what `finish_moving` completes.
    """
    names = [name for name in (*FILES, *FOLDERS) if name not in _NOT_MOVED and os.path.lexists(run_dir / name)]
    target = _moving(run_dir) or (_begin_moving(run_dir) if names else None)
    if target is None:
        return None
    for name in names:
        os.rename(run_dir / name, target / name)
    return target.rename(target.with_suffix(""))


def finish_moving(run_dir: Path) -> None:
    """Where a kill left a run half set aside, the rest follows: it must not be taken for a whole one."""
    if _moving(run_dir):
        set_aside(run_dir)


def _moving(run_dir: Path) -> Path | None:
    return next((run_dir / EARLIER).glob(f"*{_MOVING}"), None)


def _begin_moving(run_dir: Path) -> Path:
    folder = run_dir / EARLIER
    folder.mkdir(mode=0o700, exist_ok=True)
    numbers = {path.stem for path in folder.iterdir()}
    target = folder / f"{next(number for number in count(1) if str(number) not in numbers)}{_MOVING}"
    target.mkdir(mode=0o700)
    os.close(os.open(target / MARK, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return target


SCHEMA_VERSION = 1

DROPPED = "dropped"
"""The split of groups that no step trained on, which has a folder of its own."""


@dataclass(frozen=True)
class Span:
    """What an actor did, or waited for, from `start` to `end` (`time.time()`). step: the trainer's at the end of the
    span, counted from 1. version: of the weights that a group began with, or that decoded. on: who is waited for.
    restart: that wrote it, for readers."""

    start: float
    end: float
    kind: str
    what: str
    step: int | None = None
    group_id: int | None = None
    version: int | None = None
    on: str | None = None
    restart: int = 0


class RunFolder(AbstractContextManager["RunFolder"]):
    """Appends metrics, events and spans, and writes samples and JSON files whole. Safe to call from several threads.

    restart: counts the starts of this run in this folder, from 0.
    resumed_at: the step of the checkpoint that this restart resumes from (-1: it starts anew); readers leave out
    records of earlier restarts about later steps. Without it that step is taken from the first step that is written.
    part: 0 claims the folder. Others do not: their spans and samples are in files of their own, and of events they
    append whole lines.

    Raises RunFolderError when the folder is in use by another process, or is somebody's.
    """

    def __init__(self, path: Path, restart: int, resumed_at: int | None = None, part: int = 0):
        self.path = Path(path)
        self.restart = restart
        self._part = part
        self._lock = threading.Lock()  # the lines of two threads would mix, and those that wait for a flush be lost
        self._claim = ExitStack()
        if not part:
            self._claim.enter_context(claimed(self.path))
        self._metrics = LineFile(self.path / "metrics.jsonl")
        self._events = LineFile(self.path / "events.jsonl")
        self._spans: dict[str, LineFile] = {}
        self._closed = False
        if part:
            return
        where = {} if resumed_at is None else {"resumed_at": resumed_at}
        self.event("start", f"restart {restart} started", schema=SCHEMA_VERSION, pid=os.getpid(), **where)

    def write_json(self, name: str, data: object) -> None:
        """Write `name` (e.g. "run.json") whole or not at all."""
        write_atomically(self._plain(name), encode(data, indent=2) + b"\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file (e.g. "config.yaml") whole or not at all."""
        write_atomically(self._plain(name), text.encode("utf-8", "backslashreplace"))

    def metrics(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Append one record of flat metric names; `kind` is "train", "val", "sft", ... Flushes everything."""
        nested = nest({name: float(value) for name, value in values.items()})
        with self._lock:
            self._metrics.append({"step": step, "t": time.time(), "restart": self.restart, "kind": kind, "m": nested})
        self.flush()

    def flush(self) -> None:
        """Spans so far are in their files, whatever becomes of the process."""
        with self._lock:
            for spans in self._spans.values():
                spans.flush()

    def event(self, kind: str, message: str, **fields: object) -> None:
        """Append something that happened: "start", "end", "info", "warning", "error", "finding", "canary", ...

        `step` among the fields places it on the timeline.
        """
        record = {"t": time.time(), "restart": self.restart, "kind": kind, "message": message, **fields}
        with self._lock:
            self._events.append(record)

    def span(self, actor: str, span: Span) -> None:
        """Append to `spans/ACTOR.jsonl` an activity or a wait of an actor."""
        record = {"t0": span.start, "t1": span.end, "kind": span.kind, "what": span.what, "restart": self.restart}
        optional = {key: getattr(span, key) for key in ("step", "group_id", "version", "on")}
        record.update({key: value for key, value in optional.items() if value is not None})
        actor = f"{actor}-{self._part}" if self._part else actor
        with self._lock:
            if actor not in self._spans:
                (self.path / "spans").mkdir(mode=0o700, exist_ok=True)
                self._spans[actor] = LineFile(self.path / "spans" / f"{_file_name(actor)}.jsonl")
            self._spans[actor].append(record, flush=False)

    def samples(
        self, step: int, rows: Sequence[Mapping[str, object]], split: str = "train", append: bool = False
    ) -> None:
        """Write all samples of a step; a second call replaces the first, or adds to it."""
        folder = samples_dir(self.path, split)
        folder.mkdir(mode=0o700, exist_ok=True)
        whole = b"".join(encode({**row, "restart": self.restart}) + b"\n" for row in rows)
        path = folder / sample_file_name(step, split, self._part)
        if not append:
            write_atomically(path, whole)
            return
        with self._lock, open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(whole)

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for file in (self._metrics, self._events, *self._spans.values()):
                file.close()
            self._claim.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plain(self, name: str) -> Path:
        assert name == Path(name).name, f"{name!r} is not a plain file name"
        return self.path / name


def samples_dir(run_dir: Path, split: str) -> Path:
    """Where the sample files of a split lie."""
    return run_dir / (DROPPED if split == DROPPED else "samples")


def sample_file_name(step: int, split: str, part: int = 0) -> str:
    """ "000012.jsonl" for training samples, "val-000012.jsonl" for those of the split "val", "000012.3.jsonl" for those
    that part 3 of the run wrote."""
    prefix = "" if split in ("train", DROPPED) else f"{_file_name(split)}-"
    return f"{prefix}{step:06d}{f'.{part}' if part else ''}.jsonl"


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "_"
