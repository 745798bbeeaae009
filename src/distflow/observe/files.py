"""Files that are whole or not there: whatever is killed meanwhile, a reader finds the old one or the new one."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ASIDE: Final = ".distflow-partial"
"""How the names of files end that a kill may leave: `NAME.` and 8 characters stand before it."""

_LEFT: Final = re.compile(rf".+\.[a-z0-9_]{{8}}{re.escape(ASIDE)}|\.tmp[A-Za-z0-9]{{6}}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, for its owner alone, that is synced and takes its place on the way out.

    Its name is one that nothing had, so that no file of somebody's, and none that a link leads to, is written over.

    Until then, and if killed, `path` is what it was. An error inside (OSError of a full disk) passes through and leaves
    nothing beside it.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=ASIDE, dir=path.parent)
    aside = Path(name)
    try:
        os.fchmod(descriptor, 0o600)  # whatever the umask
        os.close(descriptor)
        yield aside
        aside.chmod(0o600)  # who writes by path may have made it anew
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_aside(name: str) -> bool:
    """Whether a file was left by a kill inside `replacing`, or inside safetensors, which has files of its own there."""
    return _LEFT.fullmatch(name) is not None


def remove_asides(folder: Path) -> None:
    """Remove what a kill left anywhere below, for whoever alone writes there. Links are not followed."""
    for root, _, names in os.walk(folder):
        for name in filter(is_aside, names):
            Path(root, name).unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Afterwards the file is whole and on the disk. Raises OSError; see `replacing`."""
    with replacing(path) as aside:
        aside.write_bytes(data)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
