"""Files that are complete or absent: whatever is killed meanwhile, a reader finds the old file or
the new one.

JSON lines that survive a kill: one writer appends whole lines, and the reader skips torn ones.

JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity".
"""

import io
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from distflow.errors import UserError
from distflow.observe.sanitized_output import escaped_json
from distflow.untrusted_files import MAX_JSON_VALUES, count_values, lines_of, open_file, read_file

ASIDE: Final = ".distflow-partial"
"""The suffix of files that a kill may leave, after `NAME.` and 8 characters."""

_LEFT: Final = re.compile(rf".+\.[a-z0-9_]{{8}}{re.escape(ASIDE)}|\.tmp[A-Za-z0-9]{{6}}")


def empty_folder(path: str | Path, named: str = "") -> Path:
    """A folder that is empty or not there yet, and can be written to. named: what names it, for
    messages. Raises UserError for any other."""
    folder = Path(path).expanduser()
    try:
        is_occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise UserError(
            f"{named}'{folder}' cannot be looked into: {error.strerror}: name another folder"
        ) from error

    if is_occupied:
        raise UserError(f"{named}'{folder}' exists and is not an empty folder: name another one")

    try:
        tempfile.TemporaryDirectory(
            dir=next(each for each in (folder, *folder.parents) if each.exists())
        ).cleanup()
    except OSError as error:
        raise UserError(
            f"{named}'{folder}' cannot be made: {error.strerror}: name another folder"
        ) from error

    return folder


@contextmanager
def replacing(path: Path, synced: bool = True) -> Iterator[Path]:
    """An empty file beside `path`, private to its owner, that is synced (unless not `synced`) and
    replaces `path` on exit.

    Its name is new, so that no other file, and none behind a link, is overwritten.

    Until then, or if killed, `path` is unchanged. An error inside (OSError of a full disk) passes
    through and leaves nothing behind.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=ASIDE, dir=path.parent)
    aside = Path(name)
    try:
        os.fchmod(descriptor, 0o600)  # whatever the umask
        os.close(descriptor)
        yield aside
        aside.chmod(0o600)  # code that writes by path may have recreated it
        if synced:
            sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)  # after an error; otherwise it was renamed

    if synced:
        sync(path.parent)


def is_aside(name: str) -> bool:
    """Whether a kill inside `replacing` left the file, or one inside safetensors, which has its own
    files there."""
    return _LEFT.fullmatch(name) is not None


def remove_asides(folder: Path) -> None:
    """Remove files that a kill left anywhere below; only for the sole writer. Links are not
    followed."""
    for root, below, names in os.walk(folder):
        if len(Path(root).relative_to(folder).parts) > 20:
            below.clear()  # the walk is recursive
        for name in filter(is_aside, names):
            Path(root, name).unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is complete and on disk afterwards. Raises OSError; see
    `replacing`."""
    with replacing(path) as aside:
        aside.write_bytes(data)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


JSON: TypeAlias = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
"""A value that the `json` module reads, and that `to_json` returns."""

MAX_DEPTH = 100
MAX_NUMBER = 1e300
"""Numbers beyond it are infinite to `to_number`, so that sums of the others are finite."""

LATEST_TIME = 1e11
"""Seconds since the epoch; a later time is none."""

_MAX_WHOLE = 2**63
_MAX_OBJECT_BYTES = 8 * 2**20
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: object) -> JSON:
    """The value as plain JSON data. Scalars of numpy or torch become numbers, anything else its
    `str`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return json.dumps(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if callable(tolist := getattr(value, "tolist", None)):
        return to_json(tolist())

    return str(value)


def to_number(value: object) -> float | None:
    """The number that `to_json` wrote, or None if it is not a number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        if abs(value) > MAX_NUMBER:
            return math.inf if value > 0 else -math.inf
        return float(value)
    if isinstance(value, str):
        return NON_FINITE.get(value)

    return None


def whole(value: object) -> int | None:
    """The whole number of a record; None if it is none, or too large."""
    return value if type(value) is int and -_MAX_WHOLE < value < _MAX_WHOLE else None  # no bool


def time_of(record: Mapping[str, JSON]) -> float:
    """The record's time in seconds since the epoch; 0 if it has no valid one."""
    t = to_number(record.get("t")) or 0.0
    return t if 0 <= t <= LATEST_TIME else 0.0


def is_deep(value: object) -> bool:
    """Whether lists and mappings are nested deeper than `MAX_DEPTH`: recursion over such a value
    may fail."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below = list[object]()
        for holder in level:
            if isinstance(holder, dict):
                below += holder.values()
            elif isinstance(holder, list):
                below += holder

        if not below:
            return False
        level = below

    return True


_encode_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def encode(value: object, indent: int | None = None) -> bytes:
    """JSON in UTF-8. Lone surrogates, which UTF-8 cannot hold, and invisible characters become JSON
    escapes, which are read back unchanged."""
    plain = to_json(value)
    if indent is None:
        text = _encode_line(plain)
    else:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)
    return escaped_json(text).encode("utf-8", "backslashreplace")


class LineFile:
    """Appends one JSON object per line. Each flush is one `write`, so that a kill tears at most the
    last line."""

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[bytes] = []
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        size = os.fstat(self._fd).st_size
        # If an earlier writer was killed within a line, the next record must start on a new line.
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def append(self, record: Mapping[str, object], flush: bool = True) -> None:
        """Add one line; without `flush` it waits in memory for the next flush."""
        self._pending.append(encode(record) + b"\n")
        if flush:
            self.flush()

    def flush(self) -> None:
        """Pass all waiting lines to the operating system. Raises OSError with the file (for a full
        disk)."""
        if not self._pending:
            return

        data = memoryview((b"\n" if self._torn else b"") + b"".join(self._pending))
        self._pending.clear()
        self._torn = True

        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write to the run's folder: {error.strerror}", str(self.path)
            ) from error

        self._torn = False

    def close(self) -> None:
        """Flush and close. A later write fails, whatever file has the descriptor's number by
        then."""
        self.flush()
        os.close(self._fd)
        self._fd = -1


def read_records(
    path: Path, max_bytes: int | None = None, folder: Path | None = None
) -> tuple[list[dict[str, JSON]], int]:
    """The objects of a JSON-lines file and the number of lines that could not be read; see
    `iter_records`."""
    found = list(iter_records(path, max_bytes, folder))
    records = [record for record in found if record is not None]
    return records, len(found) - len(records)


def iter_records(
    path: Path, max_bytes: int | None = None, folder: Path | None = None
) -> Iterator[dict[str, JSON] | None]:
    """The objects of a JSON-lines file, None for an unreadable line; empty if there is no such
    file.

    max_bytes: only whole lines within this much of the file's end, or fewer if they would take too
    much memory. folder: the one that the file must be in. Raises UserError if it is not in it, or
    is not readable.
    """
    try:
        with open_file(path, folder) as file:
            if max_bytes is None:
                lines = lines_of(file)
            else:
                lines = io.BytesIO(_end(file, max_bytes))
            yield from (parse_object(line) for line in lines if line.strip())
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error


def read_object(path: Path, folder: Path | None = None) -> dict[str, JSON]:
    """The object of a JSON file; empty if the file is missing or has none. Raises UserError as
    `iter_records` does."""
    try:
        return parse_object(read_file(path, folder, _MAX_OBJECT_BYTES)) or {}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"'{path}' cannot be read: {error.strerror}. Move it away, or put a readable file there"
    )


def _end(file: BinaryIO, max_bytes: int) -> bytes:
    """The whole lines in the end of the file, fewer if they would take too much memory."""
    start = max(file.seek(0, os.SEEK_END) - max_bytes, 0)
    file.seek(start)

    data = file.read(max_bytes)
    while count_values(data) + 20 * data.count(b"\n") > MAX_JSON_VALUES:
        start += len(data) // 2
        data = data[len(data) // 2 :]

    return data.partition(b"\n")[2] if start else data


def parse_object(text: bytes) -> dict[str, JSON] | None:
    """The JSON object of a line; None if it has none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None

    is_flat = text.count(b"{") + text.count(b"[") <= MAX_DEPTH  # which is quicker to see
    if isinstance(value, dict) and (is_flat or not is_deep(value)):
        return value
    return None
