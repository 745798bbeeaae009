"""Requests that are answered later: each is carried out once, however often it is sent, and kept
until its result is fetched."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distflow.tinker.messages import BadRequest

Result = bytes | dict[str, Any]
"""A protobuf message or a JSON object."""
_MAX_WAITING = 20_000
"""Of one session."""
_KEPT_S = 600.0
_MISSING_S = 60.0
"""Until a number is given up that does not come, as its request was refused before its turn."""
_ANY = b""
"""The digest of a request of which only the result is known."""


class Conflict(Exception):
    """Another request came under the number of one that is known."""


class Gone(Exception):
    """A request that is not known, or whose result is not kept."""


class TooMany(Exception):
    """More requests wait than the server keeps."""


@dataclass
class _Known:
    digest: bytes
    task: "asyncio.Task[Result]"


class Futures:
    """By request ids, which clients number. Used on one event loop."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._counts = Counter[str]()
        """Of those that are known, by session."""
        self._fetched: dict[str, float] = {}
        """When a result was last sent, the longest ago first."""

    def submit(self, request_id: str, digest: bytes, work: Callable[[], Awaitable[Result]]) -> None:
        """Start the work, unless the same request is known. Raises Conflict, TooMany."""
        known = self._known.get(request_id)
        if known is not None:
            if known.digest not in (digest, _ANY):
                raise Conflict(f"{request_id} was another request")
            return

        self._forget_fetched()
        session = _session_of(request_id)
        if self._counts[session] >= _MAX_WAITING:
            raise TooMany(f"{self._counts[session]:,} results wait to be fetched")

        task = asyncio.ensure_future(work())
        task.add_done_callback(_look_at)
        self._known[request_id] = _Known(digest, task)
        self._counts[session] += 1

    def restore(self, request_id: str, result: Result) -> None:
        """Know the result of a request that a server before carried out."""

        async def known() -> Result:
            return result

        self.submit(request_id, _ANY, known)

    async def result(self, request_id: str, within_s: float) -> Result | None:
        """None if it is not there in time. Raises Gone, BadRequest for a client's mistake, and what
        else the work raised."""
        known = self._known.get(request_id)
        if known is None:
            raise Gone(f"there is no request {request_id!r:.80}: the server was started again")

        await asyncio.wait((known.task,), timeout=within_s)
        if not known.task.done():
            return None

        if self._known.get(request_id) is known:
            self._fetched.pop(request_id, None)
            self._fetched[request_id] = time.monotonic()

        if known.task.cancelled():
            raise BadRequest("the request was cancelled")
        return known.task.result()

    def cancel(self, request_id: str) -> None:
        """Cancel and forget the request, if it is known."""
        known = self._forget(request_id)
        self._fetched.pop(request_id, None)
        if known is not None:
            known.task.cancel()

    def cancel_all(self, prefix: str) -> None:
        """Those whose ids begin so."""
        for request_id in [each for each in self._known if each.startswith(prefix)]:
            self.cancel(request_id)

    def _forget_fetched(self) -> None:
        old = time.monotonic() - _KEPT_S
        while self._fetched:
            request_id, fetched = next(iter(self._fetched.items()))
            if fetched > old:
                break
            del self._fetched[request_id]
            self._forget(request_id)

    def _forget(self, request_id: str) -> _Known | None:
        known = self._known.pop(request_id, None)
        if known is not None:
            session = _session_of(request_id)
            self._counts[session] -= 1
            if not self._counts[session]:
                del self._counts[session]
        return known


def _session_of(request_id: str) -> str:
    return request_id.partition(":")[0]


def _look_at(task: "asyncio.Task[Result]") -> None:
    """An error that nobody fetches is no news of asyncio's."""
    if not task.cancelled():
        task.exception()


class Turns:
    """Requests of one model are carried out in the order of their numbers, from 1, in whatever
    order they come. One that does not come in time is given up."""

    def __init__(self) -> None:
        self._next = 1
        self._moved = time.monotonic()
        """When the next number became that."""
        self._unfinished: dict[int, asyncio.Event] = {}
        self._ended = set[int]()
        """Numbers that were cancelled before their turn, and are skipped then."""

    def start_after(self, number: int) -> None:
        """Requests up to this number were carried out."""
        self._next = number + 1

    async def take(self, number: int, work: Callable[[], Awaitable[Result]]) -> Result:
        """Wait for the turn of the number, and do the work. Raises BadRequest for a number that was
        taken, and what the work raises; the next has its turn then too."""
        taken = number in self._unfinished or number in self._ended
        if number < self._next or taken:
            raise BadRequest(f"seq_id {number} was used: the next is {self._next}")

        turn = self._unfinished[number] = asyncio.Event()
        if number == self._next:
            turn.set()

        try:
            while not turn.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(turn.wait(), _MISSING_S)
                self._skip_missing()
            return await work()
        finally:
            del self._unfinished[number]
            self._ended.add(number)
            self._go_on()

    def _skip_missing(self) -> None:
        is_late = time.monotonic() - self._moved >= _MISSING_S
        if self._next not in self._unfinished and is_late:
            self._next = min(self._unfinished)
            self._go_on()

    def _go_on(self) -> None:
        while self._next in self._ended:
            self._ended.remove(self._next)
            self._next += 1
            self._moved = time.monotonic()
        if self._next in self._unfinished:
            self._unfinished[self._next].set()
