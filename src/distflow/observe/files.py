"""Files that are whole or not there: whatever is killed meanwhile, a reader finds the old one or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, for its owner alone, that is synced and takes its place on the way out.

    Until then, and if killed, `path` is what it was. An error inside (OSError of a full disk) passes through and leaves
    nothing beside it.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        yield aside
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


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
