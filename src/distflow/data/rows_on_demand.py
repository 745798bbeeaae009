"""Rows that are read on demand. Those of a large file are read individually, with an index of their
positions (lines of JSONL, row groups of Parquet). Those of many files, compressed JSON lines and
streamed data sets can only be read forward, so their number is unknown."""

import hashlib
import json
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow

from distflow.data.dataset_columns import FileRow, plain
from distflow.data.sources import MAX_LIST_BYTES, is_data_set, read_line, rows_of
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON, replacing
from distflow.untrusted_files import check_file, is_compressed, lines_of, matching_files, open_file

NUM_FIRST = 256
NUM_HELD = 8192
"""Rows of a stream kept in memory: the first ones of each pass, and the last ones read."""


_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class IndexedFile:
    """A file whose rows can be read individually, by any process."""

    path: Path
    size: int
    """In bytes, when it was indexed."""
    num_rows: int
    fingerprint: str
    """Of all bytes; for Parquet of the footer."""
    places: Path | None = None
    """For JSONL: the file with each row's line number and first byte."""
    group_ends: tuple[int, ...] = ()
    """For Parquet: the rows up to the end of each row group."""
    chosen: Path | None = None
    """The file with the numbers of the used rows, if not all are."""

    def row(self, index: int) -> FileRow:
        """The row, from 0. Raises UserError if the file has changed since it was indexed, or cannot
        be read."""
        try:
            if self.path.stat().st_size != self.size:
                raise ValueError("the file has changed since the run began: start the run again")
            if self.chosen is not None:
                index = int(_numbers(self.chosen)[index])
            return self._table_row(index) if self.places is None else self._line(self.places, index)
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            raise UserError(f"row {index + 1} of '{self.path}' cannot be read: {error}") from error

    def _table_row(self, index: int) -> FileRow:
        group = bisect_right(self.group_ends, index)
        first = self.group_ends[group - 1] if group else 0
        table = _row_group(self.path, group, self.fingerprint)
        return f"{self.path}, row {index + 1}", table.slice(index - first, 1).to_pylist()[0]

    def _line(self, places: Path, index: int) -> FileRow:
        number, start = _numbers(places).reshape(-1, 2)[index].tolist()
        with open_file(self.path) as file:
            file.seek(start)
            line = next(lines_of(file))
        if start == 0:
            line = line.removeprefix(BOM_UTF8)
        return f"{self.path}:{number}", read_line(line)


def _numbers(file: Path) -> "np.memmap[Any, np.dtype[np.int64]]":
    return np.memmap(check_file(file), np.int64, "r")


def choose_rows(found: IndexedFile, rows: Iterable[int], folder: Path) -> IndexedFile:
    """The index of only these rows of the file."""
    numbers = array("q", rows)
    chosen = _write(numbers, folder, hashlib.sha256(numbers.tobytes()).hexdigest())
    return replace(found, num_rows=len(numbers), chosen=chosen)


def _write(numbers: "array[int]", folder: Path, fingerprint: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder.absolute() / f"rows-{fingerprint[:12]}.index"
    with replacing(file) as aside, aside.open("wb") as sink:
        numbers.tofile(sink)
    return file


def index_file(path: Path, folder: Path, key: str) -> IndexedFile:
    """Pass over a JSONL file once for its line ends, without parsing; for Parquet only read the
    footer.

    folder: where the positions of lines are written. key: the config key that names the file, for
    messages. Raises UserError for a file that has no such index.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return _index_parquet(path)
        if path.suffix.lower() in _LINES:
            return _index_lines(path, folder)
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{key}: '{path}' cannot be read: {error}") from error
    raise UserError(
        f"{key}: data.lazy reads .jsonl and .parquet files, and '{path}' is neither: set "
        "data.lazy=false"
    )


def _index_lines(path: Path, folder: Path) -> IndexedFile:
    digest = hashlib.sha256()
    found = array("q")
    size = 0
    with open_file(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            digest.update(line)
            if (line if size else line.removeprefix(BOM_UTF8)).strip():
                found.extend((number, size))
            size += len(line)
    places = _write(found, folder, digest.hexdigest())
    return IndexedFile(path, size, len(found) // 2, digest.hexdigest(), places)


def _index_parquet(path: Path) -> IndexedFile:
    import pyarrow.parquet

    size = path.stat().st_size
    footer = pyarrow.parquet.ParquetFile(check_file(path)).metadata
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    if any(group.total_byte_size > max(MAX_LIST_BYTES, 1000 * size) for group in groups):
        raise ValueError("a row group expands to too many bytes")
    fingerprint = hashlib.sha256(repr(footer.to_dict()).encode()).hexdigest()
    ends = tuple(accumulate(group.num_rows for group in groups))
    return IndexedFile(path, size, footer.num_rows, fingerprint, group_ends=ends)


@lru_cache(maxsize=4)  # a row group is read as a whole
def _row_group(path: Path, number: int, fingerprint: str) -> pyarrow.Table:
    """fingerprint: of the file, which may have changed between two runs of one process."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(check_file(path)).read_row_group(number)


def reads_by_row(source: str) -> bool:
    """Whether `data.lazy` reads the source: a file with an index of its rows, or a stream."""
    return Path(source).suffix.lower() in (*_LINES, ".parquet") or is_streamed(source)


def is_streamed(source: str) -> bool:
    """Whether the source can only be read forward: a pattern, compressed lines, a folder or a data
    set of the hub."""
    return bool(matching_files(source)) or is_compressed(Path(source)) or is_data_set(source)


class RowStream:
    """The rows of some sources, reread from the start when they end; row numbers continue from one
    pass to the next. It can be pickled, and reads anew in another process."""

    def __init__(self, sources: Sequence[str], key: str, most: int) -> None:
        """key: of the config, for messages. most: rows of a pass, -1 for all."""
        self._sources = tuple(sources)
        self._key = key
        self._most = most
        self._lock = Lock()  # rollout loop and checks both read
        self._pass: Iterator[FileRow] | None = None
        self._held = dict[int, FileRow]()
        self._next = 0
        self._began = 0
        self._num_rows: int | None = None  # known after the first pass

    def __reduce__(self) -> tuple[object, ...]:
        return RowStream, (self._sources, self._key, self._most)

    @property
    def fingerprint(self) -> str:
        """A hash of the first rows, since no more are read before the run."""
        first: list[JSON] = []
        for _, found in islice(self._one_pass(), NUM_FIRST):
            first.append([{}, found] if isinstance(found, str) else [plain(found), None])
        return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()

    def row(self, index: int) -> FileRow:
        """The row, from 0. One that is neither held nor ahead costs a pass from the start. Raises
        UserError if the sources cannot be read."""
        with self._lock:
            if index not in self._held and index < self._next:
                self._pass = None
            while index not in self._held:
                self._read_next(index)
            return self._held[index]

    def _read_next(self, wanted: int) -> None:
        if self._pass is None:
            self._pass = self._one_pass()
            first = wanted - wanted % self._num_rows if self._num_rows else 0
            self._began = first
            self._next = first
        # an error ends this pass, but not the stream
        rows = self._pass
        self._pass = None
        row = next(rows, None)
        self._pass = rows
        if row is not None:
            self._held[self._next] = row
            self._next += 1
            if len(self._held) > NUM_FIRST + NUM_HELD:
                del self._held[next(each for each in self._held if each >= NUM_FIRST)]
            return
        self._num_rows = self._next - self._began
        if not self._num_rows:
            raise UserError(f"{self._key}: no rows in {', '.join(self._sources)}")
        self._pass = self._one_pass()
        self._began = self._next

    def _one_pass(self) -> Iterator[FileRow]:
        rows = chain.from_iterable(
            rows_of(source, self._key, streaming=True) for source in self._sources
        )
        return rows if self._most < 0 else islice(rows, self._most)
