"""The owner and the writers of a folder: a run takes one that is new, empty or a run's, and no other."""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from distflow.errors import UserError
from distflow.observe.crash_safe_files import read_object
from distflow.observe.harmless_output import escape_control

WRITER: Final = ".writer"
"""Locked by who writes: byte 0 by the process that started the run, which it names, byte 1 by those that joined. Who
opens and closes it gives a lock of the same process up: it is not looked into."""

MARK: Final = ".distflow-run"
"""Says that the folder is a run's."""

FILES: Final = (
    *("run.json", "config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "ledger.jsonl", "report.html"),
    *("trace.json", "wandb.json", "trackio.json", "mlflow.json", "mlflow.db", "swanlab.json"),
)
FOLDERS: Final = (
    *("checkpoints", "samples", "dropped", "spans", "tokens", "data", "bundles", "tensorboard", "wandb", "models"),
    *("huggingface", "mlartifacts", "swanlog", "earlier"),
)
_LOCK: Final = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, process."""

_OWNER, _JOINED = 0, 1
_END_WITHIN_S: Final = 20.0

_OTHER: Final = "set trainer.default_local_dir or trainer.experiment_name to another folder"


class RunFolderError(UserError):
    """The run's folder cannot be used: it is somebody's, another run writes to it, or it is no folder."""


_locks: dict[Path, int] = {}
"""The open `WRITER` of each folder that this process has locked."""
os.register_at_fork(after_in_child=_locks.clear)  # which has no lock


@contextmanager
def claimed(path: Path) -> Iterator[str]:
    """Hold a lock while we write: two writers would mix their lines. The system frees it when we are killed. It is a
    record lock, not `flock`: a forked worker that outlives us must not hold it for us.

    Claims nest within this process. Files that it creates meanwhile, anywhere, are for their owner alone. Yields who
    has claimed it. Raises RunFolderError, with nothing changed, where another writes or the folder is somebody's.
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
    """Write for `owner` until this process ends, or has claimed the folder itself. Raises RunFolderError where another
    start owns the folder."""
    if path.absolute() in _locks:
        return
    os.umask(0o077)
    fd = os.open(path / WRITER, os.O_RDWR | os.O_NOFOLLOW)
    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _JOINED)
    _locks[path.absolute()] = fd
    if _owner_in(fd) != owner:  # read after locking; a start writes it before it looks for locks
        raise RunFolderError(f"another start has taken over the run's folder {path} from this process")


def claim_again(path: Path, restart: int) -> str:
    """For the owner, before it starts again in place: who joined has ended, and a late one cannot join any more."""
    fd = _locks[path.absolute()]
    _write_owner(fd, f", restart {restart}")
    wait_for_joined(path)
    return _owner_in(fd)


def wait_for_joined(path: Path) -> None:
    """For the owner: wait until who joined has ended. Raises RunFolderError if one does not."""
    until = time.monotonic() + _END_WITHIN_S
    while (pid := _locker(_locks[path.absolute()], _JOINED, 1)) is not None:
        if time.monotonic() > until:
            raise RunFolderError(f"process {pid} of an earlier start still writes to {path}; end it, or {_OTHER}")
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
        raise RunFolderError(f"{who} is writing to the run's folder {path}; end it, or {_OTHER}") from error
    except UserError:
        raise
    except (OSError, ValueError) as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        cause = "a file is in the way" if in_the_way else str(error)
        raise RunFolderError(f"the run's folder cannot be {path}: {cause}; {_OTHER}") from error


def writer_of(path: Path) -> int | None:
    """The process that holds the lock of a run's folder, None where none does: no run writes there. 0: one that this
    machine does not see, such as another machine's.

    Not for the process itself, which would give up its own lock by looking.
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
            f"{path} contains files not from a distflow run ({_listed(path)}), which a run could overwrite: "
            f"{_OTHER}, new or empty"
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return os.open(path / WRITER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def is_ours(path: Path) -> bool:
    """Whether a run may write there: nothing is there, or an empty folder, or a run's.

    A run's has our mark, or a run.json of ours where it was copied without it. A start that was killed before it made
    its mark leaves the lock alone, which is empty. Raises OSError where it is no folder.
    """
    if not path.exists():
        return True
    names = {entry.name for entry in path.iterdir()}
    if MARK in names or not names:
        return True
    killed = names == {WRITER} and (path / WRITER).lstat().st_size == 0
    return killed or "distflow" in read_object(path / "run.json")


def _check_kinds(path: Path) -> None:
    """Raises RunFolderError now, not when the first step is to be written."""
    for name in FILES:
        file = path / name
        if file.is_symlink() or file.exists() and not file.is_file():
            raise RunFolderError(f"{file} is not a file, but a run writes one there: move it away, or {_OTHER}")
    for name in FOLDERS:
        folder = path / name
        if os.path.lexists(folder) and not folder.is_dir():
            raise RunFolderError(f"{folder} is not a folder, but a run needs one there: move it away, or {_OTHER}")


def _listed(path: Path) -> str:
    names = sorted(escape_control(entry.name, 60, one_line=True) for entry in path.iterdir())
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
