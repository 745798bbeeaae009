"""Ownership of a run's folder, which must be new, empty or a run's, and its writer. `run_reader`
reads it; `docs/schema.md` describes every file.

Also moves an earlier run in the folder as a whole into `earlier/N`.
"""

import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from distflow.errors import UserError
from distflow.observe.crash_safe_files import LineFile, encode, read_object, write_atomically
from distflow.observe.sample_files import SAMPLES, SCHEMA_VERSION, SampleWriter, sample_file_name
from distflow.observe.sanitized_output import escape_control

WRITER: Final = ".writer"
"""The lock file: byte 0 is locked by the process that started the run, which the file names, byte 1
by those that joined. It is not read by its owner, since closing it would release the process's
lock."""

MARK: Final = ".distflow-run"
"""Marks the folder as a run's."""

FILES: Final = (
    *(
        "run.json",
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "events.jsonl",
        "ledger.jsonl",
        "report.html",
    ),
    *("trace.json", "wandb.json", "trackio.json", "mlflow.json", "mlflow.db", "swanlab.json"),
)
FOLDERS: Final = (
    *(
        "checkpoints",
        SAMPLES,
        "spans",
        "tokens",
        "data",
        "bundles",
        "tensorboard",
        "wandb",
        "models",
    ),
    *("profiles", "huggingface", "mlartifacts", "swanlog", "earlier"),
)
_LOCK: Final = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, process."""

_OWNER = 0
_JOINED = 1
_END_WITHIN_S: Final = 20.0

_OTHER: Final = "set trainer.default_local_dir or trainer.experiment_name to another folder"


class RunFolderError(UserError):
    """The run's folder cannot be used: it is not a run's, another run writes to it, or it is not a
    folder."""


_locks: dict[Path, int] = {}
"""The open `WRITER` of each folder that this process has locked."""
os.register_at_fork(after_in_child=_locks.clear)  # a fork has no lock


@contextmanager
def claimed(path: Path) -> Iterator[str]:
    """Hold a lock while writing, since two writers would mix their lines. The system frees it if we
    are killed. It is a record lock, not `flock`, so that a forked worker that outlives us does not
    hold it.

    Claims nest within this process. Files that it creates meanwhile, anywhere, are private to their
    owner. Yields the claimer's name. Raises RunFolderError, with nothing changed, if another
    process writes, or it is not a run's.
    """
    key = path.absolute()
    if key in _locks:
        yield _owner_in(_locks[key])
        return

    umask = os.umask(0o077)
    try:
        _take(path)
        wait_for_joined(path)
        yield _owner_in(_locks[key])
    finally:
        os.umask(umask)
        if key in _locks:
            os.close(_locks.pop(key))


def join(path: Path, owner: str) -> None:
    """Write for `owner` until this process ends, or claims the folder itself. Raises RunFolderError
    if another start owns the folder."""
    if path.absolute() in _locks:
        return

    os.umask(0o077)
    fd = os.open(path / WRITER, os.O_RDWR | os.O_NOFOLLOW)
    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _JOINED)
    _locks[path.absolute()] = fd

    if _owner_in(fd) != owner:  # read after locking; a start writes it before it looks for locks
        raise RunFolderError(
            f"another start has taken over the run's folder {path} from this process"
        )


def claim_again(path: Path, restart: int) -> str:
    """For the owner, before it restarts in place: joined processes have ended, and late ones can no
    longer join."""
    fd = _locks[path.absolute()]
    _write_owner(fd, f", restart {restart}")
    wait_for_joined(path)
    return _owner_in(fd)


def wait_for_joined(path: Path) -> None:
    """For the owner: wait until all joined processes have ended. Raises RunFolderError if one does
    not."""
    until = time.monotonic() + _END_WITHIN_S
    while (pid := _locker(_locks[path.absolute()], _JOINED, 1)) is not None:
        if time.monotonic() > until:
            raise RunFolderError(
                f"process {pid} of an earlier start still writes to {path}; end it, or {_OTHER}"
            )
        time.sleep(0.05)


def _take(path: Path) -> None:
    try:
        fd = _locks[path.absolute()] = _open(path)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER)
        _check_kinds(path)
        os.close(os.open(path / MARK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        _write_owner(fd)
    except BlockingIOError as error:
        who = f"another process ({_owner_in(fd) or 'unknown'})"
        raise RunFolderError(
            f"{who} is writing to the run's folder {path}; end it, or {_OTHER}"
        ) from error
    except UserError:
        raise
    except (OSError, ValueError) as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        cause = "a file is in the way"
        if not in_the_way:
            cause = getattr(error, "strerror", None) or str(error)

        raise RunFolderError(
            f"the run's folder {path} cannot be used: {cause}; {_OTHER}"
        ) from error


def writer_of(path: Path) -> int | None:
    """The process that holds the lock of a run's folder; None if no run writes there. 0: a process
    that this machine does not see, e.g. another machine's.

    Not for the lock's own process, which would release its lock.
    """
    try:
        with (path / WRITER).open("rb+") as file:
            return _locker(file.fileno())
    except OSError:
        return None


def _locker(fd: int, start: int = 0, length: int = 0) -> int | None:
    request = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _write_owner(fd: int, more: str = "") -> None:
    os.ftruncate(fd, 0)
    since = time.strftime(f"since %Y-%m-%d %H:%M:%S %Z{more}")
    os.pwrite(fd, f"pid {os.getpid()} on {os.uname().nodename} {since}".encode(), 0)


def _owner_in(fd: int) -> str:
    return escape_control(os.pread(fd, 200, 0).decode(errors="replace"), 200, one_line=True)


def _open(path: Path) -> int:
    if not is_ours(path):
        raise RunFolderError(
            f"{path} contains files not from a distflow run ({_listed(path)}), which a run could "
            f"overwrite: {_OTHER}, new or empty"
        )

    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return os.open(path / WRITER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def is_ours(path: Path) -> bool:
    """Whether a run may write there: it does not exist, or is an empty folder, or a run's.

    A run's folder has our mark, or our run.json if it was copied without the mark. A start that was
    killed before that leaves only the lock, which is empty. Raises OSError if it is not a folder.
    """
    if not path.exists():
        return True

    names = {entry.name for entry in path.iterdir()}
    if MARK in names or not names:
        return True

    # not empty: another start has just marked the folder, after its names were read
    lock = path / WRITER
    killed = names == {WRITER} and (lock.lstat().st_size == 0 or (path / MARK).exists())
    return killed or "distflow" in read_object(path / "run.json")


def _check_kinds(path: Path) -> None:
    """Raises RunFolderError now, rather than when the first step is written."""
    for name in FILES:
        file = path / name
        if file.is_symlink() or file.exists() and not file.is_file():
            raise RunFolderError(
                f"{file} is not a file, but a run writes one there: move it away, or {_OTHER}"
            )

    for name in FOLDERS:
        folder = path / name
        if os.path.lexists(folder) and not folder.is_dir():
            raise RunFolderError(
                f"{folder} is not a folder, but a run needs one there: move it away, or {_OTHER}"
            )


def _listed(path: Path) -> str:
    names = sorted(escape_control(entry.name, 60, one_line=True) for entry in path.iterdir())
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


EARLIER: Final = "earlier"
_NOT_MOVED: Final = (EARLIER, "data", "models")
"""Not moved, since the next run may be reading them. Names of files in them are derived from their
content."""

_MOVING: Final = ".moving"


def set_aside(run_dir: Path) -> Path | None:
    """Move a run's files to a separate folder, so that another run can start over.

    Returns that folder, which is a run's folder; None if there was no run. For the claimer of
    `run_dir`. After a kill, `finish_moving` completes it.
    """
    names = [
        name
        for name in (*FILES, *FOLDERS)
        if name not in _NOT_MOVED and os.path.lexists(run_dir / name)
    ]
    target = _moving(run_dir) or (_begin_moving(run_dir) if names else None)
    if target is None:
        return None

    for name in names:
        os.rename(run_dir / name, target / name)
    return target.rename(target.with_suffix(""))


def finish_moving(run_dir: Path) -> None:
    """Finish moving a run aside after a kill: the rest must not be taken for a whole run."""
    if _moving(run_dir):
        set_aside(run_dir)


def _moving(run_dir: Path) -> Path | None:
    return next((run_dir / EARLIER).glob(f"*{_MOVING}"), None)


def _begin_moving(run_dir: Path) -> Path:
    folder = run_dir / EARLIER
    folder.mkdir(mode=0o700, exist_ok=True)
    numbers = {path.stem for path in folder.iterdir()}
    target = (
        folder / f"{next(number for number in count(1) if str(number) not in numbers)}{_MOVING}"
    )
    target.mkdir(mode=0o700)
    os.close(os.open(target / MARK, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))

    return target


@dataclass(frozen=True)
class Span:
    """An activity or wait of an actor, from `start` to `end` (`time.time()`). step: the trainer's
    at the end of the span, counted from 1. version: of the weights that a group began with, or that
    decoded. on: who is waited for. restart: the one that wrote it, for readers."""

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
    """Appends metrics, events and spans, and writes JSON files atomically, and samples in a thread.
    Thread-safe.

    restart: counts the starts of this run in this folder, from 0. resumed_at: the step of the
    checkpoint that this restart resumes from (-1: it starts over); readers skip records of earlier
    restarts about later steps. Without it, they skip none. part: 0
    claims the folder. Others do not: their spans and samples are in separate files, and they append
    whole lines of events.

    Raises RunFolderError if the folder is in use by another process, or is not a run's.
    """

    def __init__(self, path: Path, restart: int, resumed_at: int | None = None, part: int = 0):
        self.path = Path(path)
        self.restart = restart
        self._part = part

        # lines of two threads would mix, and lines that wait for a flush be lost
        self._lock = threading.Lock()
        self.sample_writer = SampleWriter(partial(self.event, "warning"))
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
        self.event(
            "start", f"restart {restart} started", schema=SCHEMA_VERSION, pid=os.getpid(), **where
        )

    def write_json(self, name: str, data: object) -> None:
        """Write `name` (e.g. "run.json") whole or not at all."""
        write_atomically(self._plain(name), encode(data, indent=2) + b"\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file (e.g. "config.yaml") whole or not at all."""
        write_atomically(self._plain(name), text.encode("utf-8", "backslashreplace"))

    def metrics(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Append one record of flat metric names; `kind` is "train", "val", "sft", ... Flushes
        everything."""
        record = {"step": step, "t": time.time(), "restart": self.restart, "kind": kind}
        flat = {name: float(value) for name, value in values.items()}
        with self._lock:
            self._metrics.append({**record, "m": flat})
        self.flush()

    def flush(self) -> None:
        """Write spans so far to their files, whatever happens to the process."""
        with self._lock:
            for spans in self._spans.values():
                spans.flush()

    def event(self, kind: str, message: str, **fields: object) -> None:
        """Append an event: "start", "end", "info", "warning", "error", "finding", "canary", ...

        `step` among the fields places it on the timeline. Without effect after `close`: threads of
        trackers may outlive it.
        """
        record = {
            "t": time.time(),
            "restart": self.restart,
            "kind": kind,
            "message": message,
            **fields,
        }

        with self._lock:
            if not self._closed:
                self._events.append(record)

    def span(self, actor: str, span: Span, step: int | None = None) -> None:
        """step: if the span has none."""
        record = {
            "t0": span.start,
            "t1": span.end,
            "kind": span.kind,
            "what": span.what,
            "restart": self.restart,
        }
        step = step if span.step is None else span.step
        optional = (
            ("step", step),
            ("group_id", span.group_id),
            ("version", span.version),
            ("on", span.on),
        )
        record.update({key: value for key, value in optional if value is not None})
        actor = f"{actor}-{self._part}" if self._part else actor

        with self._lock:
            if actor not in self._spans:
                (self.path / "spans").mkdir(mode=0o700, exist_ok=True)
                self._spans[actor] = LineFile(self.path / "spans" / f"{_file_name(actor)}.jsonl")
            self._spans[actor].append(record, flush=False)

    def samples(
        self, step: int, rows: Sequence[Mapping[str, object]], split: str = "train"
    ) -> None:
        """Have all samples of a step written; a second call replaces the first, or adds to it if
        they were dropped."""
        split = _file_name(split)
        path = self.path / SAMPLES / sample_file_name(step, split, self._part)
        now = time.time()
        self.sample_writer.put(
            path, [{**row, "t": now, "restart": self.restart} for row in rows], step, split
        )

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        self.sample_writer.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with self._claim:  # is released even if the disk fails
                for file in (self._metrics, self._events, *self._spans.values()):
                    file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plain(self, name: str) -> Path:
        assert name == Path(name).name, f"{name!r} is not a plain file name"
        return self.path / name


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "_"
