"""The experience edge of one process, between the asyncio thread that fills it and the thread that learns from it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from distflow.data.batch import Batch
from distflow.flow.coordinator import Coordinator
from distflow.flow.ticket import Ticket, Version

FAULTS = ("error", "too_few_verdicts")

OnGroup = Callable[[Ticket, str, float, float], None]
"""(ticket, "complete" or why it was dropped, started, ended): told of every group as it ends, in `time.time()`."""


class NoProgress(RuntimeError):
    """Every group of a wave failed: going on would only spend the data."""


@dataclass
class Wave:
    """What became of the groups that started together."""

    size: int
    failures: list[str] = field(default_factory=list)


class LocalEdge:
    """Holds complete groups until their step is consumed.

    The coordinator decides; this object only guards it with a lock and wakes who waits. A failure on either side is
    raised on the other, so that nobody waits for a thread that is gone.
    """

    def __init__(self, coordinator: Coordinator, on_group: OnGroup) -> None:
        self.coordinator = coordinator
        self._on_group = on_group
        self._batches: dict[int, Batch] = {}
        self._lock = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._held = False
        self._wave = Wave(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._credits = asyncio.Event()

    async def waves(self) -> AsyncIterator[list[Ticket]]:
        """consumes credits · waits for released steps and dropped groups · produces tickets to start together"""
        self._loop = asyncio.get_running_loop()
        while True:
            self._credits.clear()
            with self._lock:
                if self._closed:
                    return
                tickets = [] if self._held else self.coordinator.take_tickets()
                self._wave = Wave(len(tickets))
                self._lock.notify_all()
            if tickets:
                yield tickets
                self._stop_without_progress()
            else:
                await self._credits.wait()

    def put(self, ticket: Ticket, batch: Batch, started: float) -> None:
        """A group has passed the experience plane."""
        with self._lock:
            self._batches[ticket.number] = batch
            self.coordinator.complete(ticket.number, int(batch.lengths("sequence").sum()))
            self._lock.notify_all()
        self._on_group(ticket, "complete", started, time.time())

    def drop(self, ticket: Ticket, reason: str, detail: str, started: float) -> None:
        """A group leaves without being trained on; its credit opens another."""
        with self._lock:
            self.coordinator.drop(ticket.number, reason)
            if reason in FAULTS:
                self._wave.failures.append(detail or reason)
            self._lock.notify_all()
        self._on_group(ticket, f"{reason}: {detail}" if detail else reason, started, time.time())

    def take(self, step: int) -> Batch | None:
        """consumes this step's groups · waits until they are complete · produces one batch in ticket order

        None where the data has ended. An empty batch of groups cannot be: such a step is refused by the coordinator.
        """
        with self._lock:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self.coordinator.finished:
                    return None
                numbers = self.coordinator.ready(step)
                if numbers is not None:
                    self._held = True
                    return Batch.concat([self._batches.pop(number) for number in numbers]) if numbers else None
                self._lock.wait()

    def release(self, step: int, published: bool) -> Version:
        """The step is trained on. Its credits open with `go_on`: until then no training group shares the engine."""
        with self._lock:
            return self.coordinator.release(step, published)

    def go_on(self) -> None:
        """The next wave may start."""
        with self._lock:
            self._held = False
        self._wake()

    def fail(self, failure: BaseException) -> None:
        """The experience plane is gone: `take` raises this."""
        with self._lock:
            self._failure = failure
            self._lock.notify_all()

    def close(self) -> None:
        """No further wave starts."""
        with self._lock:
            self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._credits.set)

    def _stop_without_progress(self) -> None:
        failures = self._wave.failures
        if len(failures) == self._wave.size:
            raise NoProgress(
                f"all {len(failures)} prompt groups that ran together failed, so nothing can progress. "
                f"The first said: {failures[0]}"
            )
