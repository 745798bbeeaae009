"""The single place to read files from others: a run's folder, a config, a model, a checkpoint.

A path may be a FIFO, a device, a link to a secret, or hold gigabytes; YAML may expand beyond its
size. Rejected files raise an OSError whose `strerror` says why, like unreadable files.
"""

import errno
import hashlib
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from io import BufferedReader
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from distflow.errors import UserError

if TYPE_CHECKING:
    import yaml

MAX_LINE_BYTES: Final = 8 * 2**20
MAX_JSON_VALUES: Final = 4_000_000
"""This many take about 500 MB in Python."""

MAX_YAML_BYTES: Final = 200_000
MAX_SOURCE_BYTES: Final = 4 * 2**20
MAX_HEADER_BYTES: Final = 8 * 2**20
"""Of safetensors: about 80,000 names, each of which takes 2 kB."""

_MAX_YAML_VALUES: Final = 20_000

CPU_LIMIT_S = 1.5
_REPEAT_S = 0.1

_POINTER: Final = b"version https://git-lfs.github.com/"

COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
"""Compressions of JSON lines, with their names in pyarrow."""


def own_cache() -> Path:
    """A folder that only this user can write to, for files that are run or trusted. Raises OSError
    if there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distflow"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, f"{folder} is writable by other users: run chmod 700 on it"
        )

    return folder


def matching_files(source: str) -> list[Path]:
    """The files of a pattern such as `data/*.jsonl`, in the order of their names; empty if it is
    not a pattern."""
    path = Path(source).expanduser()
    if not re.search(r"[*?\[]", source) or path.exists():
        return []
    return sorted(found for found in map(Path, glob(str(path), recursive=True)) if found.is_file())


def pointer_fault(path: Path) -> tuple[str, str] | None:
    """The problem and the advice if git has not downloaded a large file: a few lines of text stand
    in its place."""
    with suppress(OSError), open_file(path) as file:
        if file.read(len(_POINTER)) == _POINTER:
            return (
                f"{path.name} is a pointer of git-lfs, not the file itself",
                "download it with `git lfs pull`",
            )

    return None


def is_compressed(path: Path) -> bool:
    """Whether its name is one of compressed JSON lines."""
    return path.suffix.lower() in COMPRESSIONS and path.with_suffix("").suffix.lower() in (
        ".jsonl",
        ".ndjson",
    )


def open_file(
    path: Path, folder: Path | None = None, max_bytes: int | None = None
) -> BufferedReader:
    """A regular file, opened for reading. Raises OSError.

    folder: must contain it after following links; None if it may be anywhere. max_bytes: its
    largest size.
    """
    # before opening, which alone may block or act on a device
    _check(path, os.stat(path), folder, max_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)

    file = os.fdopen(descriptor, "rb")
    try:
        _check(path, os.fstat(descriptor), folder, max_bytes)
    except OSError:
        file.close()
        raise

    return file


def check_file(path: Path, folder: Path | None = None, max_bytes: int | None = None) -> Path:
    """The path of a file that `open_file` would open, for a library that reads it by name. Raises
    OSError."""
    open_file(path, folder, max_bytes).close()
    return path


def check_tensors(path: Path, folder: Path | None = None) -> Path:
    """The path of a file of safetensors whose header can be parsed in little memory. Raises
    OSError."""
    with open_file(path, folder) as file:
        size = int.from_bytes(file.read(8), "little")
        # else it is cut off or no such file
        if size > MAX_HEADER_BYTES and file.seek(0, os.SEEK_END) > size:
            why = f"its header has {size:,} bytes, but at most {MAX_HEADER_BYTES:,} are read"
            raise OSError(errno.EFBIG, why, str(path))

    return path


def read_file(path: Path, folder: Path | None = None, max_bytes: int | None = None) -> bytes:
    """The content of the file. Raises OSError."""
    with open_file(path, folder, max_bytes) as file:
        if max_bytes is None:
            return file.read()
        return file.read(max_bytes)


def count_values(text: bytes) -> int:
    """The number of values in JSON, or slightly more."""
    return sum(map(text.count, (b",", b"[", b"{")))


def lines_of(file: BinaryIO, size: int = sys.maxsize) -> Iterator[bytes]:
    """The lines of the next `size` bytes. Raises OSError at one that is not a line of a journal."""
    while line := file.readline(min(size, MAX_LINE_BYTES)):
        if len(line) == MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"it has a line of more than {MAX_LINE_BYTES:,} bytes")
        yield line
        size -= len(line)


def load_yaml(text: bytes | str) -> object:
    """The plain value of YAML text. Raises YAMLError, also if its aliases make it too large."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    root = loader.get_single_node()
    check_aliases(root)
    if root is None:
        return None

    return loader.construct_document(root)


def check_aliases(root: "yaml.Node | None") -> None:
    """Raises YAMLError if a document contains itself, or expands to implausibly many values through
    its aliases: ten lines of ten aliases each are 10^10 values."""
    from yaml.composer import ComposerError

    if root is not None and _num_values(root, {}) > _MAX_YAML_VALUES:
        raise ComposerError(
            None, None, f"it expands to more than {_MAX_YAML_VALUES:,} values", root.start_mark
        )


def _num_values(node: "yaml.Node", known: dict[int, float]) -> float:
    if id(node) not in known:
        known[id(node)] = float("inf")  # if it contains itself
        below: Iterable[yaml.Node] = ()
        if isinstance(node.value, list):  # a list of nodes, or of a mapping's pairs of them
            pairs = (each if isinstance(each, tuple) else (each,) for each in node.value)
            below = chain.from_iterable(pairs)

        known[id(node)] = 1 + sum(_num_values(part, known) for part in below)

    return known[id(node)]


def _check(path: Path, found: os.stat_result, folder: Path | None, max_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if folder is not None and not (target := path.resolve()).is_relative_to(folder.resolve()):
        what = f"it points outside {folder}, to {target}"
        raise OSError(errno.EXDEV, what, str(path))
    if max_bytes is not None and found.st_size > max_bytes:
        raise OSError(
            errno.EFBIG,
            f"it has {found.st_size:,} bytes, but at most {max_bytes:,} are read",
            str(path),
        )


def load_image(path: str) -> Any:
    """An image of a store. Raises UserError if its content does not have the hash in its name."""
    from PIL import Image

    try:
        with Image.open(check_file(Path(path)), formats=("PNG",)) as file:
            image = file.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"the image '{path}' of the run cannot be read: {error}; start the run again"
        ) from error

    if image_hash(image) != Path(path).stem:
        raise UserError(
            f"the image '{path}' of the run has changed since it was written: start the run again"
        )

    return image


def image_hash(image: Any) -> str:
    """Of the size and the pixels of an image of Pillow, in RGB."""
    return hashlib.sha256(b"%d %d RGB\n" % image.size + image.tobytes()).hexdigest()


class OutOfTime(BaseException):
    """Not an Exception, because parsers catch those."""


@contextmanager
def limited_time(seconds: float = CPU_LIMIT_S) -> Iterator[None]:
    """Raises OutOfTime after this much CPU time of this process, so that a busy machine changes no
    score.

    Works only in the main thread, like signals; elsewhere there is no limit. Reward workers have
    their pool's deadline too, for C code that holds the interpreter lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    previous = signal.signal(signal.SIGVTALRM, _raise_out_of_time)

    # repeated: exceptions in destructors are lost
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)

    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous or signal.SIG_DFL)


def _raise_out_of_time(signum: int, frame: FrameType | None) -> None:
    raise OutOfTime
