"""Which line of the user's own code an error came from."""

import functools
import sys
import sysconfig
import traceback
from pathlib import Path

import distflow


def users_place(error: BaseException) -> str | None:
    """File and line of the innermost frame that is neither ours nor a library's; None where there is none."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def users_place_of(thread_id: int) -> str | None:
    """The same of the line that a thread runs now."""
    frame = sys._current_frames().get(thread_id)
    return None if frame is None else _innermost(traceback.extract_stack(frame))


def _innermost(frames: traceback.StackSummary) -> str | None:
    for frame in reversed(frames):
        if frame.filename.startswith("/") and not frame.filename.startswith(_library_folders()):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        str(Path(distflow.__file__).parent),
        sys.prefix,
        *(paths[kind] for kind in ("stdlib", "purelib", "platlib")),
    }
    return tuple(f"{folder}/" for folder in found)
