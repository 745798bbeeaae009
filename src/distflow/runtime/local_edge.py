"""The experience edge of one process, between the asyncio thread that fills it and the thread that learns from it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.flow.coordinator import Coordinator
from distflow.flow.edge import Exhausted
from distflow.flow.ticket import Ticket, Version

OnGroup = Callable[[Ticket, str, float, float], None]
"""(ticket, "complete" or why it was dropped, started, ended): told of every group as it ends, in `time.time()`."""


class NoProgress(RuntimeError):
    """Every group fails: going on would only spend the data."""


class UserNoProgress(NoProgress, UserError):
    """The same, where it is the user's functions or their time limit that fail every group."""


@dataclass(frozen=True)
class Failure:
    """What a group came to grief on. users: it is for the user to mend."""

    message: str
    users: bool


class LocalEdge:
    """Holds complete groups until their step is consumed.

    The coordinator decides; this object only guards it with a lock and wakes who waits. A failure on either side is
    raised on the other, so that nobody waits for a thread that is gone.

    Groups that fail one after another, with none between them that came through, end the run when they would have
    filled two steps, or one where the data end.
    """

    def __init__(self, coordinator: Coordinator, on_group: OnGroup) -> None:
        self.coordinator = coordinator
        self._on_group = on_group
        self._batches: dict[int, Batch] = {}
        self._lock = threading.Condition()
        self._failure: BaseException | None = None
        self._failed_in_a_row: list[Failure] = []
        self._held = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._credits = asyncio.Event()

    async def waves(self) -> AsyncIterator[list[Ticket]]:
        """consumes credits · waits for released steps and dropped groups · produces tickets to start together"""
        self._loop = asyncio.get_running_loop()
        while True:
            self._credits.clear()
            with self._lock:
                if self._failure is not None:
                    return
                tickets = [] if self._held else self.coordinator.take_tickets()
                self._lock.notify_all()
            if tickets:
                yield tickets
            else:
                await self._credits.wait()

    def put(self, ticket: Ticket, batch: Batch, started: float) -> None:
        """A group has passed the experience plane. One without any verdict counts among those that fail."""
        with self._lock:
            self._batches[ticket.number] = batch
            self.coordinator.complete(ticket.number, int(batch.lengths("sequence").sum()))
            self._count(_without_verdict(batch))
            self._lock.notify_all()
        self._on_group(ticket, "complete", started, time.time())

    def drop(self, ticket: Ticket, reason: str, started: float, failure: Failure | None = None) -> None:
        """A group leaves without being trained on; its credit opens another. failure: where that was no choice."""
        with self._lock:
            self.coordinator.drop(ticket.number, reason)
            self._count(failure)
            self._lock.notify_all()
        self._on_group(ticket, f"{reason}: {failure.message}" if failure else reason, started, time.time())

    def take(self, step: int) -> Batch | None:
        """consumes this step's groups · waits until they are complete · produces one batch in ticket order

        None where the data has ended. An empty batch of groups cannot be: such a step is refused by the coordinator.
        Raises NoProgress, Exhausted, and whatever ended the experience plane.
        """
        with self._lock:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self.coordinator.finished:
                    self._refuse_failures(of_steps=1)
                    return None
                numbers = self._ready(step)
                if numbers is not None:
                    self._held = True
                    return Batch.concat([self._batches.pop(number) for number in numbers])
                self._lock.wait()

    def release(self, step: int, published: bool) -> Version:
        """The step is trained on. Its credits open with `go_on`: until then no training group shares the engine."""
        with self._lock:
            return self.coordinator.release(step, published)

    def go_on(self) -> None:
        """The next wave may start."""
        with self._lock:
            self._held = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._credits.set)

    def fail(self, failure: BaseException) -> None:
        """The experience plane is gone: `take` raises this."""
        with self._lock:
            self._failure = self._failure or failure
            self._lock.notify_all()

    def _ready(self, step: int) -> tuple[int, ...] | None:
        try:
            return self.coordinator.ready(step)
        except Exhausted:
            self._refuse_failures(of_steps=1)
            raise

    def _count(self, failure: Failure | None) -> None:
        if failure is None:
            self._failed_in_a_row.clear()
            return
        self._failed_in_a_row.append(failure)
        try:
            self._refuse_failures(of_steps=2)
        except NoProgress as err:
            self._failure = self._failure or err

    def _refuse_failures(self, of_steps: int) -> None:
        failures = self._failed_in_a_row
        if len(failures) < of_steps * self.coordinator.plan.consumer_batch:
            return
        first = failures[0]
        message = f"the last {len(failures)} prompt groups all failed, so nothing can progress; the first said: "
        if first.users:
            advice = "Repair the function that is named (custom_reward_function.path, reward.functions, dag), or the "
            advice += "answers that it is given (data.answer_key); if it is slow, raise reward.timeout_s"
            raise UserNoProgress(f"{message}{first.message}\n{advice}")
        raise NoProgress(f"{message}{first.message}")


def _without_verdict(batch: Batch) -> Failure | None:
    if "reward_errors" not in batch or bool(batch["valid"].any()):
        return None
    return Failure(str(batch["reward_errors"][0]), users=True)
