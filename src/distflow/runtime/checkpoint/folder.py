"""A folder of checkpoints: which there are, their order, leftovers of a kill. For readers and writers.

Other files may be in it. Only our own files are removed: those that a manifest of ours names, and those of a killed
save, in a folder with the mark that `make_partial` put there.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Final

from distflow.errors import UserError
from distflow.observe.files import is_aside
from distflow.runtime.checkpoint.files import MANIFEST, DamagedError, read_manifest

LATEST: Final = "latest"
PARTIAL: Final = ".partial"
REMOVED: Final = ".removed"
BEGUN: Final = ".distflow-begun"

_CHECKPOINT: Final = re.compile(r"step-(\d{6,})(-\d+)?")
_PART: Final = re.compile(r"\w+(-rank\d+)?\.(safetensors|json)")


class CheckpointError(UserError):
    """A checkpoint could not be written, or none could be read."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete and damaged ones, by name."""
    return sorted(_folders(folder, ""))


def by_age(folder: Path) -> list[Path]:
    """Checkpoints whose manifests can be read, oldest first."""
    return sorted((path for path in checkpoints_in(folder) if serial_of(path) >= 0), key=serial_of)


def serial_of(path: Path) -> int:
    """A checkpoint's place in the order of creation; -1 if its manifest cannot be read."""
    try:
        return read_manifest(path).serial
    except DamagedError:
        return -1


def next_serial(folder: Path) -> int:
    """The serial of the checkpoint that is written next."""
    return max(map(serial_of, checkpoints_in(folder)), default=-1) + 1


def make_partial(folder: Path, step: int) -> Path:
    """A folder for the checkpoint of `step` while it is written, under an unused name. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_leftovers(folder)
    plain = f"step-{step:06d}"
    names = chain([plain], (f"{plain}-{number}" for number in count(next_serial(folder))))
    taken = {path.name.removesuffix(PARTIAL) for path in folder.iterdir()}
    partial = folder / (next(name for name in names if name not in taken) + PARTIAL)
    partial.mkdir(mode=0o700)
    os.close(os.open(partial / BEGUN, os.O_CREAT | os.O_EXCL, 0o600))
    return partial


def partial_of(folder: Path, step: int) -> Path | None:
    """The folder in which a checkpoint of `step` is being written; `make_partial` ensures that there is one at most."""
    partials = (path for path in _folders(folder, PARTIAL) if (path / BEGUN).exists())
    return next((path for path in partials if path.name.split("-")[1].removesuffix(PARTIAL) == f"{step:06d}"), None)


def parts_in(partial: Path) -> list[Path]:
    """The files of a checkpoint that is being written."""
    return sorted(path for path in _entries(partial) if _PART.fullmatch(path.name) and path.name != MANIFEST)


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of a killed save or removal."""
    for path in _folders(folder, PARTIAL):
        remove_partial(path)
    for path in _folders(folder, REMOVED):
        if _is_begun(path):
            _remove_begun(path)
        else:
            remove_checkpoint(path)
    _unlink(path for path in _entries(folder) if path.name.startswith(f"{LATEST}.") and is_aside(path.name))


def remove_partial(partial: Path) -> None:
    """Remove a checkpoint that was not committed. Files that are not ours stay. Another process that still writes to it
    fails, and adds nothing."""
    if not _is_begun(partial):
        remove_checkpoint(partial)
        return
    aside = partial.with_name(partial.name.removesuffix(PARTIAL) + REMOVED)
    _remove_begun(partial if aside.exists() else partial.rename(aside))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: the files that its manifest names, last the manifest. Files that are not ours stay, and so
    do the targets of links."""
    if path.is_symlink():
        return
    with suppress(DamagedError):
        _unlink(path / name for name in read_manifest(path).files)
        (path / MANIFEST).unlink()
    _remove_empty(path)


def _is_begun(folder: Path) -> bool:
    return (folder / BEGUN).exists() and not folder.is_symlink()


def _remove_begun(folder: Path) -> None:
    _unlink(path for path in _entries(folder) if _PART.fullmatch(path.name) or is_aside(path.name))
    (folder / BEGUN).unlink()
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _unlink(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def _folders(folder: Path, end: str) -> list[Path]:
    """Folders named like a checkpoint, followed by `end`."""
    named = (path for path in _entries(folder) if path.name.endswith(end))
    return [path for path in named if _CHECKPOINT.fullmatch(path.name.removesuffix(end)) and path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    return [Path(entry) for entry in os.scandir(folder)] if folder.is_dir() else []
