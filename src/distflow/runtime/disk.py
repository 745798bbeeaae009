"""Writing to a run's folder: a disk that is full or refuses, or a file in the way, is the user's to mend."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distflow.config.errors import UserError

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG)


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Raises UserError for such a disk; what was written before it is whole."""
    try:
        yield
    except OSError as err:
        if err.errno not in (*_DISK, *_IN_THE_WAY):
            raise
        what = f"{err.strerror}: {err.filename}" if err.filename else str(err.strerror)
        raise UserError(
            f"the run's folder {run_dir} cannot be written ({what}). Checkpoints that it holds are whole. Free space, "
            "move away what is in the way, or set trainer.default_local_dir to another folder; then start again"
        ) from err
