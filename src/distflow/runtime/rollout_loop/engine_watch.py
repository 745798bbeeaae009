"""A deadline for rollout engines: one with an open request and no sign of life for too long is
abandoned.

A sign of life is a reply, or a token if the engine counts them (`num_generated_tokens`), so a long
request is not a hang. Time is counted in polls, each after a short sleep, so a stopped process, or
a suspended or overloaded machine, does not use up the deadline.
"""

import asyncio
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distflow.rollout.engine import RolloutEngine
from distflow.runtime.rollout_loop.loop_thread import LoopGivenUp

STACKS: Final = "stacks.txt"
_POLL_S: Final = 0.5


class EngineHangs(LoopGivenUp):
    """A rollout engine has an open request and does not reply."""


@dataclass(frozen=True)
class Deadline:
    """When an engine is abandoned."""

    timeout_s: float
    """How long it may give no sign of life."""
    stacks: Path | None
    """The file to which the stacks of all threads are then appended; None for standard error."""


@dataclass(frozen=True, eq=False)
class _Asked:
    """An open request to an engine."""

    what: str
    since: float
    """`time.time()`."""
    while_paused: bool
    """Even a paused engine replies to it."""


class EngineWatch:
    """Watches an engine from `start` to `stop`."""

    def __init__(
        self,
        engine: RolloutEngine,
        deadline: Deadline | None,
        hangs: Callable[[EngineHangs], None],
    ) -> None:
        """deadline: None watches nothing. hangs: called once, on another thread."""
        self._engine = engine
        self._deadline = deadline
        self._hangs = hangs

        # Only the asyncio thread changes it; for the polling thread, `list()` of a set is atomic.
        self._asked: set[_Asked] = set()
        self._num_replies = 0
        self.is_paused = False
        self._left = threading.Event()

    def start(self) -> None:
        if self._deadline is not None:
            threading.Thread(
                target=self._watch, args=(self._deadline,), name="engine-watch", daemon=True
            ).start()

    def stop(self) -> None:
        self._left.set()

    @contextmanager
    def asking(self, what: str, while_paused: bool = True) -> Iterator[None]:
        """Inside, the engine owes a reply. while_paused: even if it is paused."""
        asked = _Asked(what, time.time(), while_paused)
        self._asked.add(asked)

        replied = True  # an error is a reply too
        try:
            yield
        except asyncio.CancelledError:
            replied = False
            raise
        finally:
            self._num_replies += replied
            self._asked.discard(asked)

    def _watch(self, deadline: Deadline) -> None:
        timeout_s = deadline.timeout_s
        looks_every_s = min(_POLL_S, timeout_s / 4)

        silent_s = 0.0
        seen = self._signs_of_life()
        while not self._left.wait(looks_every_s):
            waiting = self._waiting()
            now = self._signs_of_life()
            if waiting and now == seen:
                silent_s = silent_s + looks_every_s
            else:
                silent_s = 0.0

            seen = now
            if silent_s >= timeout_s:
                self._hangs(self._given_up(waiting, deadline))
                return

    def _waiting(self) -> list[_Asked]:
        """The open requests, the oldest first."""
        owed = [asked for asked in list(self._asked) if asked.while_paused or not self.is_paused]
        return sorted(owed, key=lambda asked: asked.since)

    def _signs_of_life(self) -> tuple[int, int]:
        return self._num_replies, getattr(self._engine, "num_generated_tokens", 0)

    def _given_up(self, waiting: list[_Asked], deadline: Deadline) -> EngineHangs:
        oldest = waiting[0]
        more = len(waiting) - 1
        since = time.strftime("%H:%M:%S", time.localtime(oldest.since))
        others = f" and {more} more requests" if more else ""

        who = ""
        if hasattr(self._engine, "who"):
            who = f" ({self._engine.who})"

        return EngineHangs(
            f"the rollout engine {type(self._engine).__name__}{who} hangs: it was asked "
            f"{oldest.what} at {since}{others}, and for {deadline.timeout_s:g} s has neither "
            "replied nor generated a token. The stacks of all threads are in "
            f"{write_stacks(deadline.stacks)}. If it is only slow, raise "
            "actor_rollout_ref.rollout.timeout_s"
        )


def write_stacks(path: Path | None) -> str:
    """Append the stacks of all threads, below their names; returns where they were written."""
    names = "".join(
        f"Thread 0x{thread.ident or 0:016x}: {thread.name}\n" for thread in threading.enumerate()
    )
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n{names}\n".encode()

    with suppress(OSError):  # a full disk must not keep the hang from being reported
        if path is None:
            descriptor = os.dup(2)
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        try:
            os.write(descriptor, head)
            faulthandler.dump_traceback(descriptor, all_threads=True)
        finally:
            os.close(descriptor)

    return "standard error" if path is None else str(path)
