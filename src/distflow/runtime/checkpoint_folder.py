"""A folder of checkpoints: which there are, how old they are, what a kill left. Readers and writers agree here."""

import shutil
from pathlib import Path
from typing import Final

from distflow.config.errors import UserError
from distflow.runtime.checkpoint_files import DamagedError, read_manifest

LATEST: Final = "latest"
PARTIAL: Final = ".partial"
REMOVED: Final = ".removed"


class CheckpointError(UserError):
    """A checkpoint could not be written, or none could be read."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Whole or damaged ones, by name."""
    return sorted(path for path in folder.iterdir() if _is_checkpoint(path)) if folder.is_dir() else []


def by_age(folder: Path) -> list[Path]:
    """Checkpoints whose manifests can be read, oldest first."""
    return sorted((path for path in checkpoints_in(folder) if serial_of(path) >= 0), key=serial_of)


def serial_of(path: Path) -> int:
    """When a checkpoint was made among the others; -1 where its manifest cannot be read."""
    try:
        return read_manifest(path).serial
    except DamagedError:
        return -1


def next_serial(folder: Path) -> int:
    """Of the checkpoint that is written next."""
    return max(map(serial_of, checkpoints_in(folder)), default=-1) + 1


def partial_of(folder: Path, step: int) -> Path | None:
    """Where a checkpoint of `step` is being written; `CheckpointStore.begin` sees to it that there is one at most."""
    partials = folder.glob(f"step-*{PARTIAL}")
    return next((path for path in partials if path.name.removesuffix(PARTIAL).split("-")[1] == f"{step:06d}"), None)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed save or removal left."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.endswith((PARTIAL, REMOVED)):
                remove(path)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") and not path.name.endswith((PARTIAL, REMOVED)) and path.is_dir()
