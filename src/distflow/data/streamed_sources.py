"""Rows that can only be read forward, so that nobody knows their number before: many files, compressed JSON lines, data
sets that are streamed. They are read as they are asked for, and again from the start where they end."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from threading import Lock

from distflow.data.dataset_columns import Record, plain
from distflow.data.sources import is_data_set, records_of
from distflow.errors import UserError
from distflow.untrusted_files import is_compressed, matching_files

NUM_FIRST, NUM_HELD = 256, 8192


def is_streamed(source: str) -> bool:
    """Whether the source is read forward only: a pattern, compressed lines, a folder or a data set of the hub."""
    return bool(matching_files(source)) or is_compressed(Path(source)) or is_data_set(source)


class RowStream:
    """The rows of some sources; a row's number goes on from one pass over them to the next. It pickles, and reads anew
    in another process."""

    def __init__(self, sources: Sequence[str], key: str, most: int) -> None:
        """key: of the config, for messages. most: rows of a pass, -1 for all."""
        self._sources, self._key, self._most = tuple(sources), key, most
        self._lock = Lock()  # rollout loop and audit read
        self._pass: Iterator[Record] | None = None
        self._held, self._next, self._began = dict[int, Record](), 0, 0
        self._num_rows: int | None = None  # known after the first pass

    def __reduce__(self) -> tuple[object, ...]:
        return RowStream, (self._sources, self._key, self._most)

    @property
    def fingerprint(self) -> str:
        """A hash of the first rows: no more is read before the run."""
        first = [[plain(row.values), row.bad] for row in islice(self._one_pass(), NUM_FIRST)]
        return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()

    def record(self, index: int) -> Record:
        """The row, from 0. One that is neither held nor ahead costs a pass from the start. Raises UserError where the
        sources cannot be read."""
        with self._lock:
            if index not in self._held and index < self._next:
                self._pass = None
            while index not in self._held:
                self._read_next(index)
            return self._held[index]

    def _read_next(self, wanted: int) -> None:
        if self._pass is None:
            self._pass = self._one_pass()
            self._began = self._next = wanted - wanted % self._num_rows if self._num_rows else 0
        rows, self._pass = self._pass, None  # a fault ends this pass, but not the rows
        record = next(rows, None)
        self._pass = rows
        if record is not None:
            self._held[self._next] = record
            self._next += 1
            if len(self._held) > NUM_FIRST + NUM_HELD:
                del self._held[next(each for each in self._held if each >= NUM_FIRST)]
            return
        self._num_rows = self._next - self._began
        if not self._num_rows:
            raise UserError(f"{self._key}: no rows in {', '.join(self._sources)}")
        self._pass, self._began = self._one_pass(), self._next

    def _one_pass(self) -> Iterator[Record]:
        rows = chain.from_iterable(records_of(source, self._key, streaming=True) for source in self._sources)
        return rows if self._most < 0 else islice(rows, self._most)
