"""What is on disk of a model, so that a server that was killed goes on: its state after a request,
and the requests since."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from distflow.observe.crash_safe_files import sync, write_atomically
from distflow.tinker.checkpoints import write
from distflow.tinker.futures import Result

_RESULT = "result"
_EVERY_S = 1.0
_SHARE = 20.0
"""Saving takes at most one part in so many of a model's time."""


class Record(NamedTuple):
    """A numbered request, or the result of one."""

    number: int
    kind: str
    body: bytes


class Journal:
    """A folder with a file of requests and the last state. Thread-safe; methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._requests = folder / "requests"
        self._lock = threading.Lock()
        self._saved_at = time.monotonic()
        self._took_s = 0.0
        # without a line that a kill left unfinished
        write_atomically(self._requests, _packed(self.requests()))
        sync(folder.parent)

    def add(self, number: int, kind: str, body: bytes) -> None:
        """Returns when the request is on disk. Of several with a number the first counts."""
        with self._lock, self._requests.open("a+b") as file:
            file.write(_packed([Record(number, kind, body)]))
            file.flush()
            os.fdatasync(file.fileno())

    def requests(self) -> list[Record]:
        """In the order of their numbers: that which made the model, and those after the state."""
        number = self.saved()[0]
        found = dict[int, Record]()
        for record in _read(self._requests):
            if record.number == 0 or record.number > number:
                found.setdefault(record.number, record)
        return sorted(found.values())

    def saved(self) -> tuple[int, Path | None]:
        """The number of the request after which the state was saved, and its folder."""
        folder = max(self._folder.glob("*.state"), default=None)
        return (0, None) if folder is None else (int(folder.stem), folder)

    def results(self) -> Iterator[tuple[int, Result]]:
        """Those that clients may still ask for, of requests before the state."""
        _, state = self.saved()
        if state is not None:
            for record in _read(state / _RESULT):
                yield record.number, record.body

    @property
    def is_due(self) -> bool:
        """Whether it is time to save a state."""
        since = time.monotonic() - self._saved_at
        return since >= max(_EVERY_S, _SHARE * self._took_s)

    def save(
        self, number: int, save: Callable[[Path], None], results: Iterable[tuple[int, Result]]
    ) -> None:
        """The state after a request. save: writes it to a folder. results: that clients may ask
        for."""
        records = [Record(of, _RESULT, result) for of, result in results]

        def save_all(folder: Path) -> None:
            save(folder)
            (folder / _RESULT).write_bytes(_packed(records))

        started = time.monotonic()
        _, before = self.saved()
        write(self._folder / f"{number:09d}.state", save_all)
        with self._lock:
            write_atomically(self._requests, _packed(self.requests()))
        if before is not None:
            shutil.rmtree(before)

        self._saved_at = time.monotonic()
        self._took_s = self._saved_at - started


def _packed(records: Iterable[Record]) -> bytes:
    packed = bytearray()
    for number, kind, body in records:
        packed += json.dumps([number, kind, len(body)]).encode() + b"\n" + body
    return bytes(packed)


def _read(path: Path) -> Iterator[Record]:
    """Those that are whole."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for head in file:
            try:
                number, kind, size = json.loads(head)
            except ValueError:
                return
            body = file.read(size)
            if len(body) == size:
                yield Record(number, kind, body)
