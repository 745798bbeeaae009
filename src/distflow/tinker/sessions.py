"""The sessions of clients, in memory and on disk: when each was last heard of, the samplers that it
opened, and the journals of its models."""

import json
import os
import secrets
import shutil
import time
from pathlib import Path

from distflow.tinker.journal import Journal

_EXPIRES_S = 1800.0
"""Without a heartbeat, which clients send every 10 s."""


class Sessions:
    """Each has a folder, whose time is its last sign of life, with the journal of its samplers; the
    journals of its models are below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, float] = {}
        self._journals: dict[str, Journal] = {}
        """By the ids of sessions and models."""
        self._samplers: dict[str, str | None] = {}
        """The path of the weights that each has; None for the base."""
        self._following: dict[str, str] = {}
        """Samplers that have the newest weights which a model saved for such ones."""

    def create(self) -> str:
        session = f"session-{secrets.token_hex(6)}"
        self.journal(session)
        self._seen[session] = time.monotonic()
        return session

    def restore(self) -> list[str]:
        """Take up those, with their samplers, that were heard of shortly before the server that had
        the folder was; the others end."""
        seen = {each.name: each.stat().st_mtime for each in self._folder.glob("session-*")}
        last = max(seen.values(), default=0.0)
        for session in sorted(seen, key=lambda each: seen[each]):
            if seen[session] < last - _EXPIRES_S:
                self.end(session)
                continue

            self._seen[session] = time.monotonic()
            for record in self.journal(session).requests():
                name = f"{session}:sample:{record.number}"
                self._samplers[name] = json.loads(record.body)
        return [*self._seen]

    def note_seen(self, session: str) -> None:
        """Raises KeyError for a session that has ended."""
        self._seen[session]
        self._seen[session] = time.monotonic()
        os.utime(self._folder / session)

    def silent(self) -> list[str]:
        """Those not heard of for long."""
        return [each for each, seen in self._seen.items() if seen < time.monotonic() - _EXPIRES_S]

    def listed(self) -> list[str]:
        """The newest first."""
        return [*reversed(self._seen)]

    def end(self, session: str) -> None:
        self._seen.pop(session, None)
        for known in (self._journals, self._samplers, self._following):
            for name in [each for each in known if each.partition(":")[0] == session]:
                del known[name]
        shutil.rmtree(self._folder / session, ignore_errors=True)

    def journal(self, name: str) -> Journal:
        """Of a session's samplers, or of a model."""
        if name not in self._journals:
            session, _, number = name.partition(":train:")
            self._journals[name] = Journal(self._folder / session / number)
        return self._journals[name]

    def models(self, session: str) -> list[str]:
        """The ids of those with a journal."""
        numbers = [int(each.name) for each in (self._folder / session).glob("[0-9]*")]
        return [f"{session}:train:{number}" for number in sorted(numbers)]

    def open_sampler(self, session: str, number: int, path: str | None) -> str:
        """Raises KeyError for an unknown session."""
        self._seen[session]
        name = f"{session}:sample:{number}"
        if name not in self._samplers:
            self.journal(session).add(number, "sampler", json.dumps(path).encode())
            self._samplers[name] = path
        return name

    def follow(self, model_id: str, name: str, path: str) -> None:
        """Have a sampler and those that follow the model sample from these weights; what is being
        drawn goes on with the weights that it began with."""
        self._following[name] = model_id
        for each, followed in self._following.items():
            if followed == model_id:
                self._samplers[each] = path

    def samplers(self, session: str) -> list[str]:
        """Their names. Raises KeyError for an unknown session."""
        self._seen[session]
        return [each for each in self._samplers if each.startswith(f"{session}:")]

    def weights_of(self, sampler: str) -> str | None:
        """Their path; None for the base. Raises KeyError."""
        return self._samplers[sampler]
