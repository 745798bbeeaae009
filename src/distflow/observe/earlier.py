"""Runs that were in a folder before the one that is there: each whole, in `earlier/N` of the folder."""

import os
from itertools import count
from pathlib import Path
from typing import Final

from distflow.observe.claim import FILES, FOLDERS, MARK

EARLIER: Final = "earlier"
_KEPT: Final = (EARLIER, "data", "models")
"""What the next run may be reading by then; the names of what lies there follow from what it holds."""

_MOVING: Final = ".moving"


def set_aside(run_dir: Path) -> Path | None:
    """Move a run's files to a folder of their own, so that another starts with an empty account.

    Returns that folder, which is a run's folder; None where there was no run. For who has claimed `run_dir`. A kill
    leaves what `finish_moving` completes.
    """
    names = _of_a_run(run_dir)
    if not names and not _moving(run_dir):
        return None
    target = _moving(run_dir) or _begin_moving(run_dir)
    for name in names:
        os.rename(run_dir / name, target / name)
    return target.rename(target.with_suffix(""))


def finish_moving(run_dir: Path) -> None:
    """Where a kill left a run half set aside, the rest follows: it must not be taken for a whole one."""
    if _moving(run_dir):
        set_aside(run_dir)


def _of_a_run(run_dir: Path) -> list[str]:
    names = [name for name in (*FILES, *FOLDERS) if name not in _KEPT]
    return [name for name in names if os.path.lexists(run_dir / name)]


def _moving(run_dir: Path) -> Path | None:
    return next((run_dir / EARLIER).glob(f"*{_MOVING}"), None)


def _begin_moving(run_dir: Path) -> Path:
    folder = run_dir / EARLIER
    folder.mkdir(mode=0o700, exist_ok=True)
    taken = {path.stem for path in folder.iterdir()}
    target = folder / f"{next(number for number in count(1) if str(number) not in taken)}{_MOVING}"
    target.mkdir(mode=0o700)
    os.close(os.open(target / MARK, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return target
