"""Rows of a large file that are read individually, on demand, with an index of their positions
(lines of JSONL, row groups of Parquet)."""

import hashlib
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from distflow.data.dataset_columns import FileRow, read_line
from distflow.data.sources import MAX_LIST_BYTES
from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing
from distflow.untrusted_files import check_file, lines_of, open_file

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

    def row(self, index: int) -> FileRow:
        """The row, from 0. Raises UserError if the file has changed since it was indexed, or cannot
        be read."""
        try:
            if self.path.stat().st_size != self.size:
                raise ValueError("the file has changed since the run began: start the run again")
            if self.places is None:
                return self._table_row(index)
            return self._line(self.places, index)
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
    check_by_row(str(path), key)
    try:
        if path.suffix.lower() == ".parquet":
            return _index_parquet(path)
        return _index_lines(path, folder)
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{key}: '{path}' cannot be read: {error}") from error


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
    """Whether `data.lazy` reads the source: files with an index of their rows, or a pattern of
    such."""
    return Path(source).suffix.lower() in (*_LINES, ".parquet")


def check_by_row(source: str, key: str) -> None:
    """Raises UserError for a source that `data.lazy` does not read. key: of the config, which names
    it."""
    if not reads_by_row(source):
        raise UserError(
            f"{key}: data.lazy reads .jsonl and .parquet files, and '{source}' is neither: set "
            "data.lazy=false"
        )
