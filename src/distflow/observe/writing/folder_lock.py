"""The owner and the writer of a folder: a run takes one that is new, empty or a run's, and no other."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from distflow.errors import UserError
from distflow.observe.files import read_object
from distflow.observe.sanitize import escape_control

WRITER: Final = ".writer"
"""Locked by who writes. Who opens and closes it gives a lock of the same process up: it is not looked into."""

MARK: Final = ".distflow-run"
"""Says that the folder is a run's."""

FILES: Final = (
    "run.json",
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
    "events.jsonl",
    "ledger.jsonl",
    "report.html",
    "wandb.json",
)
FOLDERS: Final = (
    "checkpoints",
    "samples",
    "dropped",
    "spans",
    "tokens",
    "data",
    "bundles",
    "tensorboard",
    "wandb",
    "models",
    "earlier",
)
_LOCK: Final = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, process."""

_OTHER: Final = "set trainer.default_local_dir or trainer.experiment_name to another folder"


class RunFolderError(UserError):
    """The run's folder cannot be used: it is somebody's, another run writes to it, or it is no folder."""


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Make the folder and keep other processes from writing there, for whoever changes it before a `RunFolder` opens.

    Files that this process creates meanwhile, anywhere, are for their owner alone. A `RunFolder` that the same process
    closes releases the claim as well. Raises RunFolderError, as that does.
    """
    fd = own(path)
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)
        os.close(fd)


def own(path: Path) -> int:
    """Hold a lock while we write: two writers would mix their lines. The system frees it when we are killed.

    A record lock, not `flock`: a forked worker that outlives us must not hold it for us. Raises RunFolderError, with
    nothing changed, where another writes or the folder is somebody's.
    """
    try:
        fd = _open(path)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        cause = "a file is in the way" if in_the_way else str(error)
        raise RunFolderError(f"the run's folder cannot be {path}: {cause}; {_OTHER}") from error
    try:
        _lock(fd, path)
        _check_kinds(path)
        os.close(os.open(path / MARK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        for name in (WRITER, MARK):
            (path / name).chmod(0o600)  # whatever the umask
    except OSError as error:
        os.close(fd)
        raise RunFolderError(f"the run's folder {path} cannot be marked: {error}; {_OTHER}") from error
    except RunFolderError:
        os.close(fd)
        raise
    return fd


def writer_of(path: Path) -> int | None:
    """The process that holds the lock of a run's folder, None where none does: no run writes there. 0: one that this
    machine does not see, such as another machine's.

    Not for the process itself, which would give up its own lock by looking.
    """
    try:
        with (path / WRITER).open("rb+") as file:
            request = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, request))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


def _open(path: Path) -> int:
    if not is_ours(path):
        raise RunFolderError(
            f"{path} holds what no run of distflow put there ({_listed(path)}), and a run could overwrite it: "
            f"{_OTHER}, new or empty"
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return os.open(path / WRITER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunFolderError(f"another process is writing to the run's folder {path}; end it, or {_OTHER}") from error


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
            raise RunFolderError(f"{file} is no file, and a run writes one there: move it away, or {_OTHER}")
    for name in FOLDERS:
        folder = path / name
        if os.path.lexists(folder) and not folder.is_dir():
            raise RunFolderError(f"{folder} is no folder, and a run makes one there: move it away, or {_OTHER}")


def _listed(path: Path) -> str:
    names = sorted(escape_control(entry.name, 60, one_line=True) for entry in path.iterdir())
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
