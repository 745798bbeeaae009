"""The experience edge of one process, between the asyncio thread that fills it and the threads that learn from it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distflow.data.batch import Batch
from distflow.flow.balance import partition
from distflow.flow.coordinator import Coordinator
from distflow.flow.edge import Exhausted
from distflow.flow.ticket import Ticket
from distflow.observe.metrics import Measured, combine
from distflow.runtime.blame import REPAIR_ADVICE
from distflow.runtime.ports.edge import Failure, Live, NoProgress, Released, Share, UserNoProgress
from distflow.runtime.waits import Waits


@dataclass(frozen=True)
class _Complete:
    """A group that waits for its step."""

    batch: Batch
    measured: Sequence[Measured]


class LocalEdge:
    """The coordinator decides; this object only guards it with a lock, holds the batches, and wakes who waits.

    `tickets`, `put` and `drop` are called on the asyncio thread, `take` and `release` on the thread of each learning
    rank, `fail` on any. Learners wait on the lock's condition, the asyncio thread on an event of its loop: it must not
    block, so it holds the lock only for as long as the coordinator decides.

    A failure on either side is raised on the other, so that nobody waits for a thread that is gone. Groups that fail
    one after another, with none between them that came through, end the run when they would have filled two steps, or
    one where the data end.

    At staleness 0 tickets are handed out only while a step is waited for: nothing generates while the trainer updates,
    validates or saves.
    """

    def __init__(self, coordinator: Coordinator, waits: Waits, num_ranks: int = 1, live: Live | None = None) -> None:
        """live: the groups that the coordinator's snapshot holds as complete."""
        self._coordinator, self._waits, self._num_ranks = coordinator, waits, num_ranks
        self._groups: dict[int, _Complete] = _by_ticket(live)
        self._lock = threading.Condition()  # guards the coordinator, the groups, and all down to `_outcome`
        self._failure: BaseException | None = None
        self._failed_in_a_row: list[Failure] = []
        self._num_waiting = 0  # learners inside `take`
        self._shares: dict[int, Share] = {}
        self._released: set[int] = set()
        self._outcome: Released | None = None  # of the last step that all ranks have released
        # Set by `tickets` before it first looks at what the lock guards: whoever changes that and finds no loop to
        # wake changed it in time to be seen.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._credits = asyncio.Event()  # an event of the loop: other threads set it through `_wake` alone

    async def tickets(self) -> AsyncIterator[list[Ticket]]:
        """See `EdgePort`."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._credits.clear()  # before it looks: a wake from here on is not lost
            with self._lock:
                if self._failure is not None:
                    return
                opens = self._num_waiting > 0 or self._coordinator.plan.max_staleness > 0
                tickets = self._coordinator.take_tickets() if opens else []
                self._lock.notify_all()
            if tickets:
                yield tickets
                continue
            with self._waits("experience", "credits", on="learner"):
                await self._credits.wait()

    def put(self, ticket: Ticket, batch: Batch, measured: Sequence[Measured]) -> None:
        """See `EdgePort`. A group without any verdict counts among those that fail."""
        with self._lock:
            self._groups[ticket.number] = _Complete(batch, measured)
            self._coordinator.complete(ticket.number, int(batch.lengths("sequence").sum()))
            self._count(_without_verdict(batch))
            self._lock.notify_all()

    def drop(self, ticket: Ticket, reason: str, failure: Failure | None = None, *, lost: bool = False) -> None:
        """See `EdgePort`. Wakes no one on the asyncio thread: that asks for tickets again once its wave has ended."""
        with self._lock:
            if lost and self._coordinator.retry(ticket.number):
                return
            if not lost:
                self._coordinator.drop(ticket.number, reason)
            self._count(failure)
            self._lock.notify_all()

    def take(self, step: int, rank: int) -> Share | None:
        """See `EdgePort`."""
        with self._lock, self._waiting(step):
            while True:
                if self._failure is not None:
                    raise self._failure
                if rank in self._shares:
                    return self._shares.pop(rank)
                if self._coordinator.finished:
                    self._refuse_failures(of_steps=1)
                    return None
                numbers = self._ready(step)
                if numbers is None:
                    self._lock.wait()
                else:
                    self._shares = self._divided(numbers)

    def release(self, step: int, rank: int, published: bool) -> Released:
        """See `EdgePort`."""
        with self._lock:
            self._released.add(rank)
            if len(self._released) == self._num_ranks:
                self._outcome = self._release(step, published)
                self._released.clear()
                self._lock.notify_all()
            while self._outcome is None or self._outcome.version.step <= step:
                if self._failure is not None:
                    raise self._failure
                with self._waits("learner", f"release of step {step}", on="other ranks"):
                    self._lock.wait()
            return self._outcome

    def fail(self, failure: BaseException) -> None:
        """One side is gone: the other is told. The first failure counts; later ones follow from it."""
        with self._lock:
            self._failure = self._failure or failure
            self._lock.notify_all()
        self._wake()

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """A step is waited for: tickets may be handed out. Inside the lock, which waiting gives back meanwhile."""
        self._num_waiting += 1
        self._wake()
        try:
            with self._waits("learner", f"step {step}", on="experience"):
                yield
        finally:
            self._num_waiting -= 1

    def _divided(self, numbers: tuple[int, ...]) -> dict[int, Share]:
        """The groups of a step over the ranks, whole, evened out by tokens."""
        groups = [self._groups.pop(number) for number in numbers]
        metrics = combine([part for group in groups for part in group.measured])
        whole = Batch.concat([group.batch for group in groups])
        if self._num_ranks == 1:
            return {0: Share(numbers, whole, metrics)}
        parts = partition(whole.lengths("sequence").tolist(), self._num_ranks, whole["group_index"].tolist())
        return {rank: Share(numbers, whole.select(rows), metrics) for rank, rows in enumerate(parts)}

    def _release(self, step: int, published: bool) -> Released:
        version = self._coordinator.release(step, published)
        held = {number: group for number, group in sorted(self._groups.items())}
        live = Live(
            Batch.concat([group.batch for group in held.values()]) if held else None,
            {number: group.measured for number, group in held.items()},
        )
        coordinator = self._coordinator
        return Released(version, coordinator.finished, coordinator.accounting(), coordinator.snapshot(), live)

    def _ready(self, step: int) -> tuple[int, ...] | None:
        try:
            return self._coordinator.ready(step)
        except Exhausted:
            self._refuse_failures(of_steps=1)
            raise

    def _wake(self) -> None:
        """Have `tickets` look again; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._credits.set)

    def _count(self, failure: Failure | None) -> None:
        """Keep the failure, or forget those before it where a group came through. What then ends the run is raised in
        `take`: here, on the asyncio thread, it would end one group's task and nobody would hear of it."""
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
        if len(failures) < of_steps * self._coordinator.plan.consumer_batch:
            return
        first = failures[0]
        message = f"the last {len(failures)} prompt groups all failed, so nothing can progress; the first said: "
        if first.users:
            raise UserNoProgress(f"{message}{first.message}\n{REPAIR_ADVICE}")
        raise NoProgress(f"{message}{first.message}")


def _by_ticket(live: Live | None) -> dict[int, _Complete]:
    if live is None or live.batch is None:
        return {}
    owners = live.batch["group_index"].tolist()
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(owners):
        rows.setdefault(number, []).append(row)
    return {number: _Complete(live.batch.select(own), live.measured.get(number, ())) for number, own in rows.items()}


def _without_verdict(batch: Batch) -> Failure | None:
    if "reward_errors" not in batch or bool(batch["valid"].any()):
        return None
    return Failure(str(batch["reward_errors"][0]), users=True)
