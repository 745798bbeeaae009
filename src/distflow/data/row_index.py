"""Where the rows of large files are, so that each can be read alone: the lines of JSONL, the row groups of Parquet. A
JSONL file is passed over once, for its line ends, and nothing of it is parsed; of Parquet only the footer is read."""

import hashlib
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow

from distflow.data.dataset_columns import Record
from distflow.data.sources import MAX_LIST_BYTES, json_record
from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing
from distflow.untrusted_files import check_file, lines_of, open_file


@dataclass(frozen=True)
class IndexedFile:
    """A file whose rows can be read alone, by any process.

    size: in bytes, when it was indexed. fingerprint: of all bytes, of Parquet of its footer. places: of JSONL, the file
    with each row's line number and first byte. group_ends: of Parquet, the rows up to the end of each row group.
    chosen: the file with the numbers of the rows that are used, where not all are.
    """

    path: Path
    size: int
    num_rows: int
    fingerprint: str
    places: Path | None = None
    group_ends: tuple[int, ...] = ()
    chosen: Path | None = None

    def record(self, index: int) -> Record:
        """The row, from 0. Raises UserError if the file has changed since it was indexed, or cannot be read."""
        try:
            if self.path.stat().st_size != self.size:
                raise ValueError("the file has changed since the run began: start the run again")
            if self.chosen is not None:
                index = int(np.memmap(check_file(self.chosen), np.int64, "r")[index])
            if self.places is None:
                group = bisect_right(self.group_ends, index)
                row = index - (self.group_ends[group - 1] if group else 0)
                table = _row_group(self.path, group, self.fingerprint)
                return Record(f"{self.path}, row {index + 1}", table.slice(row, 1).to_pylist()[0])
            number, start = np.memmap(check_file(self.places), np.int64, "r").reshape(-1, 2)[index].tolist()
            with open_file(self.path) as file:
                file.seek(start)
                line = next(lines_of(file))
            return json_record(line if start else line.removeprefix(BOM_UTF8), f"{self.path}:{number}")
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            raise UserError(f"row {index + 1} of '{self.path}' cannot be read: {error}") from error


def choose_rows(found: IndexedFile, rows: Iterable[int], folder: Path) -> IndexedFile:
    """The index of these rows of the file alone."""
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
    """folder: where the places of lines are written. key: the config key that names the file, for messages. Raises
    UserError for a file that has no such index."""
    try:
        if path.suffix.lower() == ".parquet":
            return _index_parquet(path)
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            return _index_lines(path, folder)
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{key}: '{path}' cannot be read: {error}") from error
    raise UserError(f"{key}: data.lazy reads .jsonl and .parquet files, and '{path}' is neither: set data.lazy=false")


def _index_lines(path: Path, folder: Path) -> IndexedFile:
    digest, found, size = hashlib.sha256(), array("q"), 0
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

    size, footer = path.stat().st_size, pyarrow.parquet.ParquetFile(check_file(path)).metadata
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    if any(group.total_byte_size > max(MAX_LIST_BYTES, 1000 * size) for group in groups):
        raise ValueError("a row group expands to too many bytes")
    fingerprint = hashlib.sha256(repr(footer.to_dict()).encode()).hexdigest()
    ends = tuple(accumulate(group.num_rows for group in groups))
    return IndexedFile(path, size, footer.num_rows, fingerprint, group_ends=ends)


@lru_cache(maxsize=4)  # it is read whole for any of its rows
def _row_group(path: Path, number: int, fingerprint: str) -> pyarrow.Table:
    """fingerprint: of the file, which may have changed between two runs of one process."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(check_file(path)).read_row_group(number)
