"""What a model needs on disk to be as it was when its server was killed: its state after a request,
the requests since, and the results of the last ones."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distflow.tinker.checkpoints import write
from distflow.tinker.futures import Result

_STATE = ".state"
_RESULTS = (".json", ".protobuf")
_KEPT_RESULTS = 256
_EVERY_S = 1.0
_SHARE = 20.0
"""Saving takes at most one part in so many of a model's time."""


class Journal:
    """A folder of files that are named by the requests' numbers. Used by whoever has the model's
    turn, `add` excepted."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._saved_at = time.monotonic()
        self._took_s = 0.0

    def add(self, number: int, kind: str, body: bytes) -> None:
        """A request, before it is carried out. Raises OSError."""
        _write(self._folder / f"{number:09d}.{kind}", body)

    def answer(self, number: int, result: Result) -> None:
        """Raises OSError."""
        if isinstance(result, bytes):
            _write(self._folder / f"{number:09d}.protobuf", result)
        else:
            _write(self._folder / f"{number:09d}.json", json.dumps(result).encode())

    @property
    def is_due(self) -> bool:
        """Whether it is time to save a state."""
        since = time.monotonic() - self._saved_at
        return since >= max(_EVERY_S, _SHARE * self._took_s)

    def save(self, number: int, save: Callable[[Path], None]) -> None:
        """The state after a request. save: writes it to a folder. Raises OSError."""
        started = time.monotonic()
        write(self._folder / f"{number:09d}{_STATE}", save)
        self._saved_at = time.monotonic()
        self._took_s = self._saved_at - started
        for path in self._folder.iterdir():
            self._forget(path, number)

    def _forget(self, path: Path, saved: int) -> None:
        """Remove what the state after that request replaces."""
        own = _number(path)
        if path.suffix in _RESULTS:
            is_old = own <= saved - _KEPT_RESULTS
        else:
            is_old = 0 < own < saved or own == saved and path.suffix != _STATE

        if is_old and path.is_dir():
            shutil.rmtree(path)
        elif is_old:
            path.unlink()

    def state(self) -> Path | None:
        """The last one."""
        return max(self._folder.glob(f"*{_STATE}"), default=None)

    def results(self) -> Iterator[tuple[int, Result]]:
        for suffix in _RESULTS:
            for path in self._folder.glob(f"*{suffix}"):
                data = path.read_bytes()
                yield _number(path), json.loads(data) if suffix == ".json" else data

    def requests(self) -> Iterator[tuple[int, str, bytes]]:
        """The numbers, kinds and bodies: of the one that made the model, and of those after its
        state."""
        state = self.state()
        saved = 0 if state is None else _number(state)
        for path in sorted(self._folder.glob("[0-9]*")):
            own = _number(path)
            if path.suffix not in (*_RESULTS, _STATE) and (own > saved or own == 0):
                yield own, path.suffix.removeprefix("."), path.read_bytes()


def _number(path: Path) -> int:
    return int(path.name.lstrip(".").partition(".")[0])


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, unless the machine fails. Does nothing if the file is there."""
    if path.exists():
        return
    new = path.with_name(f".{path.name}")
    new.write_bytes(data)
    os.replace(new, path)
