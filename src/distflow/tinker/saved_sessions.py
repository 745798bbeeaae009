"""The sessions of a server on disk: when each was last heard of, its samplers, and the journals of
its models."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from distflow.observe.crash_safe_files import read_records

_SEEN = "seen"
_SAMPLERS = "samplers.jsonl"


class SavedSessions:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, session: str) -> None:
        """Raises OSError."""
        (self._folder / session).mkdir(parents=True)
        (self._folder / session / _SEEN).touch()

    def note_seen(self, session: str) -> None:
        os.utime(self._folder / session / _SEEN)

    def note_sampler(self, session: str, number: int, path: str | None) -> None:
        """Raises OSError."""
        with (self._folder / session / _SAMPLERS).open("a") as file:
            file.write(json.dumps({"number": number, "path": path}) + "\n")

    def end(self, session: str) -> None:
        shutil.rmtree(self._folder / session, ignore_errors=True)

    def take_recent(self, within_s: float) -> list[str]:
        """Those heard of in that time before the server was last, in the order of their last signs
        of life. The others are ended."""
        seen = {}
        for folder in self._folder.glob("session-*"):
            sign = folder / _SEEN
            seen[folder.name] = sign.stat().st_mtime if sign.exists() else 0.0

        last = max(seen.values(), default=0.0)
        recent = []
        for session, at in sorted(seen.items(), key=lambda each: each[1]):
            if at >= last - within_s:
                recent.append(session)
            else:
                self.end(session)
        return recent

    def samplers(self, session: str) -> Iterator[tuple[int, str | None]]:
        for record in read_records(self._folder / session / _SAMPLERS)[0]:
            path = record["path"]
            yield int(str(record["number"])), None if path is None else str(path)

    def models(self, session: str) -> list[int]:
        """Their numbers."""
        return sorted(int(each.name) for each in (self._folder / session).glob("[0-9]*"))

    def journal(self, session: str, number: int) -> Path:
        """The folder of a model's journal."""
        return self._folder / session / str(number)
