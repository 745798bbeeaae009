"""A deadline for rollout engines: one with an open request and no sign of life for too long is
abandoned.

A sign of life is a reply, or a token if the engine counts them (`num_generated_tokens`), so a long
request is not a hang. Time is counted in polls, each after a short sleep, so a stopped process, or
a suspended or overloaded machine, does not use up the deadline. Neither does a debugger's prompt.
"""

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from distflow.data.sample import Segment
from distflow.errors import count_of
from distflow.rollout.engine import GenerateRequest, RolloutEngine, WeightReceipt
from distflow.runtime.rollout_loop.loop_thread import LoopGivenUp
from distflow.scheduling.group_states import Version

STACKS: Final = "stacks.txt"
_POLL_S: Final = 0.5
_DEBUGGERS: Final = ("bdb", "pydevd", "_pydevd_bundle", "debugpy")


class EngineHangs(LoopGivenUp):
    """A rollout engine has an open request and does not reply."""


@dataclass(frozen=True)
class Deadline:
    """timeout_s: how long an engine may give no sign of life. stacks: the file to which the stacks
    of all threads are then appended; None for standard error."""

    timeout_s: float
    stacks: Path | None


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request to an engine, and its time (`time.time()`). while_paused: even a paused engine
    replies to it."""

    what: str
    since: float
    while_paused: bool


class WatchedEngine:
    """A `RolloutEngine` that forwards to another one, which it watches while entered.

    hangs: called once, on another thread.
    """

    def __init__(
        self, engine: RolloutEngine, deadline: Deadline, hangs: Callable[[EngineHangs], None]
    ) -> None:
        self._engine = engine
        self._deadline = deadline
        self._hangs = hangs
        # Only the asyncio thread changes it; for the polling thread, `list()` of a set is atomic.
        self._asked: set[_Asked] = set()
        self._num_replies = 0
        self._paused = False
        self._left = threading.Event()

    @property
    def version(self) -> Version:
        return self._engine.version

    def __getattr__(self, name: str) -> Any:
        """What only some engines have, such as counts and a log of their activity."""
        return getattr(self._engine, name)

    async def __aenter__(self) -> "WatchedEngine":
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self._left.set)
            with self._asking("to start"):
                await self._engine.__aenter__()
            if_it_fails.pop_all()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        try:
            with self._asking("to end"):
                await self._engine.__aexit__(*exception)
        finally:
            self._left.set()

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        with self._asking(_described(request), while_paused=False):
            return await self._engine.generate(request)

    async def pause(self, release: bool = False) -> None:
        with self._asking("to pause"):
            await self._engine.pause(release)
        self._paused = True

    async def resume(self) -> None:
        with self._asking("to resume"):
            await self._engine.resume()
        self._paused = False

    async def hashes(self) -> dict[str, str]:
        with self._asking("for hashes of its weights"):
            return await self._engine.hashes()

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        what = "to load the weights of" if weights is not None else "to number its weights as"
        with self._asking(f"{what} step {version.step}"):
            return await self._engine.load_weights(version, weights)

    @contextmanager
    def _asking(self, what: str, while_paused: bool = True) -> Iterator[None]:
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

    def _watch(self) -> None:
        timeout_s = self._deadline.timeout_s
        looks_every_s = min(_POLL_S, timeout_s / 4)
        silent_s = 0.0
        seen = self._signs_of_life()
        while not self._left.wait(looks_every_s):
            waiting = self._waiting()
            now = self._signs_of_life()
            silent_s = silent_s + looks_every_s if waiting and now == seen else 0.0
            seen = now
            if silent_s < timeout_s:
                continue
            if not _is_debugged():
                self._hangs(self._given_up(waiting))
                return
            silent_s = 0.0

    def _waiting(self) -> list[_Asked]:
        """The open requests, the oldest first."""
        owed = [asked for asked in list(self._asked) if asked.while_paused or not self._paused]
        return sorted(owed, key=lambda asked: asked.since)

    def _signs_of_life(self) -> tuple[int, int]:
        return self._num_replies, getattr(self._engine, "num_generated_tokens", 0)

    def _given_up(self, waiting: list[_Asked]) -> EngineHangs:
        oldest = waiting[0]
        more = len(waiting) - 1
        since = time.strftime("%H:%M:%S", time.localtime(oldest.since))
        others = f" and {more} more requests" if more else ""
        who = f" ({self._engine.who})" if hasattr(self._engine, "who") else ""
        return EngineHangs(
            f"the rollout engine {type(self._engine).__name__}{who} hangs: it was asked "
            f"{oldest.what} at "
            f"{since}{others}, and for {self._deadline.timeout_s:g} s has neither replied nor "
            "generated a token. The "
            f"stacks of all threads are in {write_stacks(self._deadline.stacks)}. If it is only "
            "slow, raise "
            "actor_rollout_ref.rollout.timeout_s"
        )


def _described(request: GenerateRequest) -> str:
    many = count_of(len(request.samples), "sample")
    return (
        f"for {many} of row {request.stream.row} ({request.stream.name}, epoch "
        f"{request.stream.epoch}; a prompt of "
        f"{len(request.prompt_ids)} tokens, up to {request.params.max_tokens} new ones)"
    )


def _is_debugged() -> bool:
    """Whether a thread is in a debugger, where a person may take any time at the prompt."""
    modules = set()
    for top in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(top):
            modules.add(str(frame.f_globals.get("__name__")).partition(".")[0])
    return not modules.isdisjoint(_DEBUGGERS)


def write_stacks(path: Path | None) -> str:
    """Append the stacks of all threads, below their names; returns where they were written."""
    names = "".join(
        f"Thread 0x{thread.ident or 0:016x}: {thread.name}\n" for thread in threading.enumerate()
    )
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n{names}\n".encode()
    with suppress(OSError):  # a full disk must not keep the hang from being reported
        descriptor = (
            os.dup(2)
            if path is None
            else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        )
        try:
            os.write(descriptor, head)
            faulthandler.dump_traceback(descriptor, all_threads=True)
        finally:
            os.close(descriptor)
    return "standard error" if path is None else str(path)
