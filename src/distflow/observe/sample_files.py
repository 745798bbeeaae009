"""The samples of a run as Parquet files, one for each step, split and writing process: their
schema, the thread that writes them, and their reader. A file is whole or absent, whatever is
killed; `docs/schema.md` lists the columns.
"""

import json
import threading
import time
import tomllib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from distflow.errors import UserError, count_of
from distflow.observe.crash_safe_files import (
    JSON,
    encode,
    is_deep,
    replacing,
    to_number,
    unreadable,
)
from distflow.untrusted_files import MAX_JSON_VALUES, count_values, open_file

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

SCHEMA_VERSION: Final = 1
"""Of a run's folder. Readers refuse folders of newer versions, and read those of the two before."""

SAMPLES: Final = "samples"
DROPPED: Final = "dropped"
"""The split of groups that no step trained on."""

Row = dict[str, JSON]


class Column(NamedTuple):
    """kind: "text", "number", "whole" or "json", a text that holds JSON."""

    kind: str
    meaning: str


_TABLE = tomllib.loads(Path(__file__).with_name("sample_columns.toml").read_text("utf-8"))
COLUMNS: Final = {name: Column(*column) for name, column in _TABLE.items()}

_DERIVED = ("step", "split", "fate", "group_id")
"""Not part of a row in Python: derived from the others, and from the file's name."""
_ALWAYS = ("score", "acc", "errors", "advantage", "ground_truth", "restart")
"""Part of every row in Python, even if null."""
_REPEATED = ["domain", "prompt", "images", "ground_truth", "finish_reason", "versions", "dropped"]
_REPEATED += ["set", "kind", "step", "split", "fate", "restart"]
"""Columns whose values repeat; the others would only fill a dictionary."""

_MAGIC: Final = b"PAR1"
_VERSION_KEY: Final = b"distflow_schema"
_GROUP_CHARACTERS: Final = 4 * 2**20
_ROW_BYTES = 500
_BATCH_ROWS = 64
_MOST_ZIPPED = 64
_MAX_WHOLE = 2**63
_MOST_FOOTER = 8 * 2**20
_MAX_WAITING: Final = 400 * 2**20
_DROPPED_EVERY_S = 30.0
_CLOSE_S: Final = 60.0


def sample_file_name(step: int, split: str, part: int = 0) -> str:
    """ "000012.parquet" for training samples, "val-000012.parquet" for those of the split "val",
    "000012.3.parquet" for those written by part 3 of the run. split: made of letters that a file's
    name may have."""
    of_split = "" if split == "train" else f"{split}-"
    of_part = f".{part}" if part else ""
    return f"{of_split}{step:06d}{of_part}.parquet"


def write_sample_file(
    path: Path, rows: Sequence[Mapping[str, object]], step: int, split: str
) -> None:
    """Write the file whole or not at all. Raises OSError."""
    import pyarrow
    import pyarrow.parquet

    stored = [_stored(row, step, split) for row in rows]
    schema = pyarrow.schema([(name, _arrow_type(column.kind)) for name, column in COLUMNS.items()])

    arrays = []
    for name, column in COLUMNS.items():
        values = [row.get(name) for row in stored]
        arrays.append(_array(column.kind, values))

    rows_of_group = max(_GROUP_CHARACTERS * len(rows) // max(_size(rows), 1), 1)
    options = {
        "compression": "zstd",
        "use_dictionary": _REPEATED,
        "store_schema": False,
        "write_page_checksum": True,
    }
    path.parent.mkdir(mode=0o700, exist_ok=True)

    with (
        replacing(path) as aside,
        pyarrow.parquet.ParquetWriter(aside, schema, **options) as writer,
    ):
        writer.write_table(pyarrow.table(arrays, schema=schema), rows_of_group)
        writer.add_key_value_metadata({_VERSION_KEY: str(SCHEMA_VERSION)})


def _stored(row: Mapping[str, object], step: int, split: str) -> dict[str, Any]:
    """The values of a row's columns, without nulls."""
    group = str(row.get("uid", "")).partition("-")[0]
    fate = {"train": "trained", DROPPED: f"dropped: {row.get('dropped')}"}.get(split, "validated")

    known = {"step": step, "split": split, "fate": fate, **row}
    if group.isdecimal() and len(group) < 19:
        known["group_id"] = int(group)
    else:
        known["group_id"] = None

    more = {name: value for name, value in row.items() if name not in COLUMNS}
    known["more"] = more or None
    return {
        name: _as_kind(COLUMNS[name].kind, value)
        for name, value in known.items()
        if name in COLUMNS and value is not None
    }


def _as_kind(kind: str, value: object) -> object:
    if kind == "text" and isinstance(value, str):
        return value.encode("utf-8", "backslashreplace")
    if kind in ("text", "json"):
        return encode(value)
    if kind == "whole":
        if isinstance(value, int) and abs(value) < _MAX_WHOLE:
            return value
        return None

    return to_number(value)


# Arrays are made of buffers: `pyarrow.array` imports pandas.


def _arrow_type(kind: str) -> "pyarrow.DataType":
    import pyarrow

    return {"number": pyarrow.float64(), "whole": pyarrow.int64()}.get(kind, pyarrow.string())


def _array(kind: str, values: Sequence[Any]) -> "pyarrow.Array":
    import pyarrow

    bits = 0
    for place, value in enumerate(values):
        bits |= (value is not None) << place

    buffers = [pyarrow.py_buffer(bits.to_bytes(-(-len(values) // 8), "little"))]
    if kind in ("number", "whole"):
        numbers = array(
            "d" if kind == "number" else "q", (0 if value is None else value for value in values)
        )
        buffers.append(pyarrow.py_buffer(numbers))
    else:
        texts = [value or b"" for value in values]
        offsets = array("i", accumulate(map(len, texts), initial=0))
        buffers += [pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(texts))]

    return pyarrow.Array.from_buffers(_arrow_type(kind), len(values), buffers)


def _size(rows: Sequence[Mapping[str, object]]) -> int:
    """About their characters."""
    return sum(_ROW_BYTES + len(str(row)) for row in rows)


@dataclass
class _File:
    """A file to write, or the last one of dropped samples, of which more may come."""

    step: int

    split: str

    rows: list[Mapping[str, object]] = field(default_factory=list)

    size: int = 0

    due: float = 0.0
    """Not to be written before, in `time.monotonic()`."""

    has_new: bool = True
    """Whether some of its rows are not written."""


class SampleWriter:
    """Writes files in a thread of its own, so that no step waits for them. The samples that wait
    are bounded: what comes on top, or cannot be written, is lost, and counted in `num_lost`.

    Dropped samples come one group at a time. Their file is written anew with each that is there by
    then, twice a minute at most.

    on_loss: called with a message at the first loss, on any thread.
    """

    def __init__(self, on_loss: Callable[[str], None]):
        self._on_loss = on_loss
        self._condition = threading.Condition()
        self._files: dict[Path, _File] = {}
        self._dropped: Path | None = None
        """The last file of dropped samples."""
        self._is_writing = False
        self._is_urgent = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.num_lost = 0

    def put(self, path: Path, rows: Sequence[Mapping[str, object]], step: int, split: str) -> None:
        """Have a file written: with these rows, or for dropped ones with those before as well.
        Never waits."""
        why = ""
        size = _size(rows)

        with self._condition:
            waiting = sum(file.size for file in self._files.values())
            if self._is_closed:
                why = "the run had ended"
            elif waiting + size > _MAX_WAITING:
                why = "the run is faster than its disk"
            else:
                file = self._file(path, step, split)
                file.rows += rows
                file.size += size
                file.has_new = True

                if self._thread is None:
                    name = "sample-writer"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()

                self._condition.notify_all()

        if why:
            self._lose(len(rows), why)

    def _file(self, path: Path, step: int, split: str) -> _File:
        """The file to add rows to: an empty one, but for dropped ones that of their step."""
        if split != DROPPED:
            self._files[path] = _File(step, split)
        elif path != self._dropped:
            last = self._dropped
            self._dropped = path
            self._files[path] = _File(step, split)
            if last is not None and not self._files[last].has_new:
                del self._files[last]

        return self._files[path]

    def finish(self, timeout_s: float = _CLOSE_S) -> bool:
        """Wait until everything is written. False if that takes too long."""
        with self._condition:
            self._is_urgent = True
            self._condition.notify_all()
            done = self._condition.wait_for(self._is_done, timeout_s)
            self._is_urgent = False
            return done

    def close(self) -> None:
        """Write what is left, and end the thread."""
        done = self.finish()
        with self._condition:
            self._is_closed = True
            left = sum(len(file.rows) for file in self._files.values() if file.has_new)
            self._files.clear()
            self._condition.notify_all()

        if not done:
            self._lose(left, f"the disk did not take them within {_CLOSE_S:g} s of the run's end")

    def _is_done(self) -> bool:
        return not self._is_writing and not any(file.has_new for file in self._files.values())

    def _run(self) -> None:
        """Consumes waiting samples · waits for them · unblocked by the run or its end · produces
        files."""
        while (taken := self._take()) is not None:
            path, file, rows = taken
            try:
                write_sample_file(path, rows, file.step, file.split)
            except OSError as error:
                self._lose(len(rows), f"{path.name} cannot be written: {error.strerror or error}")

            with self._condition:
                file.due = time.monotonic() + _DROPPED_EVERY_S
                if not file.has_new and path != self._dropped and self._files.get(path) is file:
                    del self._files[path]
                self._is_writing = False
                self._condition.notify_all()

    def _take(self) -> tuple[Path, _File, Sequence[Mapping[str, object]]] | None:
        """Wait for a file that is due, with the rows to write; None at the end."""
        with self._condition:
            while not self._is_closed:
                now = time.monotonic()
                wait = None
                for path, file in self._files.items():
                    if not file.has_new:
                        continue

                    if self._is_urgent or file.due <= now:
                        self._is_writing = True
                        file.has_new = False
                        return path, file, list(file.rows)

                    wait = file.due - now

                self._condition.wait(wait)

            return None

    def _lose(self, number: int, why: str) -> None:
        with self._condition:
            is_first = not self.num_lost
            self.num_lost += number
        if is_first and number:
            self._on_loss(f"{count_of(number, 'sample')} or more are not kept: {why}")


def read_sample_file(
    path: Path, folder: Path, max_bytes: int | None = None
) -> tuple[list[Row], str]:
    """The rows of a file, and a sentence on what is missing of it ("" if nothing); no rows if there
    is no file.

    max_bytes: of the texts that are read; None for those of any file of a run. Raises UserError if
    the file is of a newer version, not readable, or not in `folder`.
    """
    import pyarrow

    try:
        opened = open_file(path, folder)
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        raise unreadable(path, error) from error

    with opened:
        try:
            rows, number = _read(opened, path, max_bytes)
        except UserError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            return [], f"{SAMPLES}/{path.name} is damaged, its samples are missing here: {error}"

    left = number - len(rows)
    if not left:
        return rows, ""
    return rows, f"{SAMPLES}/{path.name} is too long: {left:,} of its samples are missing here"


def is_torn(path: Path, folder: Path) -> bool:
    """Whether its end is not there, or no run wrote such an end. Raises UserError as
    `read_sample_file` does."""
    try:
        with open_file(path, folder) as file:
            return not _has_footer(file)
    except OSError as error:
        raise unreadable(path, error) from error


def _has_footer(file: BinaryIO) -> bool:
    """Whether it ends as a Parquet file, with a description of its parts that takes little
    memory."""
    file.seek(-min(8, file.seek(0, 2)), 2)
    end = file.read()
    return end[4:] == _MAGIC and int.from_bytes(end[:4], "little") <= _MOST_FOOTER


def _read(opened: BinaryIO, path: Path, max_bytes: int | None) -> tuple[list[Row], int]:
    """Rows, and how many there are in all."""
    file = _checked(opened, path)
    schema = file.schema_arrow
    types = dict(zip(schema.names, map(str, schema.types), strict=True))

    names = []
    for name, (kind, _) in COLUMNS.items():
        if types.get(name) == str(_arrow_type(kind)):
            names.append(name)

    rows: list[Row] = []
    left = max_bytes or _MOST_ZIPPED * (2**20 + opened.seek(0, 2))
    for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            left -= _ROW_BYTES + sum(len(value) for value in values if isinstance(value, str))
            if left < 0:
                return rows, file.metadata.num_rows
            rows.append(_as_row(names, values))

    return rows, file.metadata.num_rows


def _checked(opened: BinaryIO, path: Path) -> "pyarrow.parquet.ParquetFile":
    import pyarrow.parquet

    if not _has_footer(opened):
        raise ValueError("its end is missing, or no run's")

    file = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True)
    version = (file.metadata.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise ValueError("it is no file of samples")
    if int(version) > SCHEMA_VERSION:
        raise UserError(newer(path, int(version)))

    return file


def newer(path: Path, version: int) -> str:
    """The message on a file or folder of a newer schema."""
    return (
        f"'{path}' is of version {version} of the schema, and this distflow reads up to "
        f"{SCHEMA_VERSION}: update it"
    )


def _as_row(names: Sequence[str], values: Sequence[Any]) -> Row:
    known = {
        name: _value(value) if COLUMNS[name].kind == "json" else value
        for name, value in zip(names, values, strict=True)
        if value is not None and name not in _DERIVED
    }
    more = known.pop("more", None)
    missing: Row = {name: None for name in _ALWAYS if name not in known}

    return {**known, **missing, **(more if isinstance(more, dict) else {})}


def _value(text: str | None) -> JSON:
    known = (text or "null").encode()
    if count_values(known) > MAX_JSON_VALUES:
        return None

    try:
        value: JSON = json.loads(known)
    except (ValueError, RecursionError):
        return None

    return None if is_deep(value) else value
