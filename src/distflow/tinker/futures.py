"""Requests that are answered later: each is carried out once, however often it is sent, and kept
until its result is fetched."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice

from distflow.tinker.messages import BadRequest, WorkerLost

Result = bytes
"""A protobuf message or a JSON object."""
Work = Callable[[], Awaitable[Result]]
_MAX_WAITING = 20_000
"""Of one session."""
_MAX_FETCHED = 256
"""Of one session: whose answers may not have reached the client, which then asks again."""
_MAX_SAVED = 32
"""Of those: a server that is killed loses few answers on their way."""
_MISSING_S = 10.0
"""Until a number is given up that does not come, as its request was refused before its turn."""


class Conflict(Exception):
    """Another request came under the number of one that is known."""


class Gone(Exception):
    """A request that is not known, or whose result is not kept."""


class TooMany(Exception):
    """More requests wait than the server keeps."""


@dataclass
class _Known:
    digest: int | None
    """Of the request; None if only its result is known."""
    task: "asyncio.Task[Result]"


@dataclass
class _Session:
    """What is known of its requests, by their ids."""

    waiting: dict[str, _Known] = field(default_factory=dict)
    fetched: dict[str, _Known] = field(default_factory=dict)
    """The last fetched is the last one."""

    def find(self, request_id: str) -> _Known | None:
        return self.waiting.get(request_id) or self.fetched.get(request_id)

    def note_fetched(self, request_id: str, known: _Known) -> None:
        self.waiting.pop(request_id, None)
        self.fetched.pop(request_id, None)
        self.fetched[request_id] = known
        if len(self.fetched) > _MAX_FETCHED:
            del self.fetched[next(iter(self.fetched))]


class Futures:
    """By request ids, `SESSION:...`, which clients number. Used on one event loop."""

    def __init__(self, on_loss: Callable[[WorkerLost], None]) -> None:
        """on_loss: called when a request failed by that."""
        self._on_loss = on_loss
        self._sessions = defaultdict[str, _Session](_Session)

    def submit(self, request_id: str, digest: int | None, work: Work) -> None:
        """Start the work, unless the same request is known. Raises Conflict, TooMany."""
        session = self._session_of(request_id)
        known = session.find(request_id)
        if known is not None:
            if None not in (known.digest, digest) and known.digest != digest:
                raise Conflict(f"{request_id} was another request")
            return

        if len(session.waiting) >= _MAX_WAITING:
            raise TooMany(f"{len(session.waiting):,} results wait to be fetched")

        task = asyncio.ensure_future(work())
        task.add_done_callback(self._look_at)
        session.waiting[request_id] = _Known(digest, task)

    def restore(self, request_id: str, result: Result) -> None:
        """Know the result of a request that a server before carried out."""

        async def known() -> Result:
            return result

        self.submit(request_id, None, known)

    async def result(self, request_id: str, within_s: float) -> Result | None:
        """None if it is not there in time. Raises Gone, BadRequest for a client's mistake, and what
        else the work raised."""
        session = self._session_of(request_id)
        known = session.find(request_id)
        if known is None:
            raise Gone(f"there is no request {request_id!r:.80}: the server was started again")

        await asyncio.wait((known.task,), timeout=within_s)
        if not known.task.done():
            return None
        if known.task.cancelled():
            raise BadRequest("the request was cancelled")

        session.note_fetched(request_id, known)
        return known.task.result()

    def results(self, model_id: str) -> Iterator[tuple[int, Result]]:
        """Those of a model that a client may still ask for, by their numbers."""
        session = self._session_of(model_id)
        last = islice(reversed(session.fetched.items()), _MAX_SAVED)
        for request_id, known in chain(session.waiting.items(), last):
            model, _, number = request_id.rpartition(":")
            task = known.task
            is_there = task.done() and not task.cancelled() and not task.exception()
            if model == model_id and is_there:
                yield int(number), task.result()

    def cancel(self, request_id: str) -> None:
        """Cancel and forget the request, if it is known."""
        session = self._session_of(request_id)
        known = session.find(request_id)
        if known is not None:
            known.task.cancel()
            session.waiting.pop(request_id, None)
            session.fetched.pop(request_id, None)

    def cancel_session(self, session: str) -> None:
        """Cancel and forget all of its requests."""
        for known in self._sessions.pop(session, _Session()).waiting.values():
            known.task.cancel()

    def cancel_all(self) -> None:
        for session in [*self._sessions]:
            self.cancel_session(session)

    def _look_at(self, task: "asyncio.Task[Result]") -> None:
        """An error that nobody fetches is no news of asyncio's."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WorkerLost):
            self._on_loss(error)

    def _session_of(self, request_id: str) -> _Session:
        return self._sessions[request_id.partition(":")[0]]


class Turns:
    """Requests of one model are carried out in the order of their numbers, in whatever order they
    come. One that does not come in time is given up."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._unfinished: dict[int, asyncio.Event] = {}
        self._ended = set[int]()
        """Numbers that were cancelled before their turn, and are skipped then."""

    async def take(self, number: int, work: Work) -> Result:
        """Wait for the turn of the number, and do the work. Raises BadRequest for a number that was
        taken, and what the work raises; the next has its turn then too."""
        taken = number in self._unfinished or number in self._ended
        if number < self._next or taken:
            raise BadRequest(f"seq_id {number} was used: the next is {self._next}")

        turn = self._unfinished[number] = asyncio.Event()
        self._go_on()
        try:
            while not turn.is_set():
                missing = self._next
                with suppress(TimeoutError):
                    async with asyncio.timeout(_MISSING_S):
                        await turn.wait()
                if missing == self._next and missing not in self._unfinished:
                    self._next = min(self._unfinished)
                    self._go_on()
            return await work()
        finally:
            del self._unfinished[number]
            self._ended.add(number)
            self._go_on()

    def _go_on(self) -> None:
        while self._next in self._ended:
            self._ended.remove(self._next)
            self._next += 1
        if self._next in self._unfinished:
            self._unfinished[self._next].set()
