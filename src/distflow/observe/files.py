"""Files that are whole or not there: whatever is killed meanwhile, a reader finds the old one or the new one."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Afterwards the file is whole and on the disk; until then, and if killed, it is what it was.

    Raises OSError (a full disk), and then leaves nothing beside it.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        sync(aside)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
