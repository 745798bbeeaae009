"""The experience edge as threads share it, whatever the groups are held as: batches in one process, references to them
where workers have processes of their own."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distflow.flow.account import Account
from distflow.flow.balance import divide_step
from distflow.flow.coordinator import Coordinator
from distflow.flow.edge import Exhausted
from distflow.flow.minibatch import minibatches
from distflow.flow.snapshot import Snapshot
from distflow.flow.ticket import Ticket, Version
from distflow.observe.metrics import Measured, combine
from distflow.rewards.tally import Judged
from distflow.runtime.blame import REPAIR_ADVICE
from distflow.runtime.ports.edge import Failure, Newcomers, NoProgress, UserNoProgress
from distflow.runtime.ports.intake import NothingToWaitFor, Standing
from distflow.runtime.waits import Waits

T = TypeVar("T")

_MOST_TICKETS = 1000
"""In one answer: 40 kB, where they go to another process."""


@dataclass(frozen=True)
class Facts:
    """What the edge knows of a complete group. num_tokens: of all its samples, prompts included. version: the lowest of
    any of their tokens, None where there is none. failure: why it has no verdict at all. num_bytes: that it takes where
    groups are held, where that is bounded."""

    num_tokens: int
    version: int | None
    failure: Failure | None
    num_bytes: int = 0


@dataclass(frozen=True)
class Team:
    """Ranks that learn the same, together, from every step.

    shares: by rank, which part of a step it takes, from 0; ranks that hold parts of the same tensors take the same.
    mini_batch: groups of an optimizer step, drawn by `seed` in each pass; None where a step has one. epochs: passes
    over a step.
    """

    shares: tuple[int, ...] = (0,)
    mini_batch: int | None = None
    seed: int = 0
    epochs: int = 1


@dataclass(frozen=True)
class Held(Generic[T]):
    """A group that waits for its step. measured: by its nodes."""

    group: T
    num_tokens: int
    measured: Sequence[Measured]


@dataclass(frozen=True)
class Portion(Generic[T]):
    """One rank's part of a step: see `Share`. own, groups: its own tickets and their groups, whole, in ticket order.
    like: the step's first, for where it has none."""

    tickets: tuple[int, ...]
    own: tuple[int, ...]
    groups: Sequence[T]
    like: T
    metrics: Mapping[str, float]
    judged: Judged


@dataclass(frozen=True)
class Consumed(Generic[T]):
    """How the run stands once all ranks have trained on a step: see `Released`. live: groups that no step has taken."""

    version: Version
    finished: bool
    stopping: bool
    account: Account
    cut: Snapshot
    live: Mapping[int, Held[T]]


@dataclass
class _Intake:
    """One worker that generates. served: the lowest step that its engine serves, as it said last. given: tickets that
    are to be fetched. running: the groups that it has, by number, those included. holds: complete groups that lie with
    it. takes: False before one that came later has asked first, and of one that is gone."""

    name: str
    served: int | None
    given: list[Ticket] = field(default_factory=list)
    running: dict[int, Ticket] = field(default_factory=dict)
    holds: set[int] = field(default_factory=set)
    takes: bool = True
    gone: bool = False


@dataclass
class _Reading(Generic[T]):
    """A step between its division and the moment in which all ranks have it. groups: all of them, by ticket. holders:
    with whom they lie, where that may die. judged: told with it. ranks: that have not said yet what they miss. whole:
    None until all have."""

    groups: dict[int, Held[T]] = field(default_factory=dict)
    holders: dict[int, _Intake] = field(default_factory=dict)
    judged: Judged = Judged()
    ranks: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    whole: bool | None = None


class SharedEdge(Generic[T]):
    """The coordinator decides; this object only guards it with a lock, holds the groups, and wakes who waits.

    Any method may be called on any thread; `take`, `release` and `wait_for_tickets` wait. Learners wait on the lock's
    condition; whoever must not block asks `tickets` again when he is woken.

    A failure on either side is raised on the other, so that nobody waits for what is gone. Groups that fail one after
    another, with none between them that came through, end the run when they would have filled two steps, or one where
    the data end.

    At staleness 0 tickets are handed out only while every rank waits for a step: nothing generates while a trainer
    updates, validates or saves. Else they are handed out whenever there is a credit. A ticket goes to the worker that
    has the fewest groups.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        waits: Waits,
        teams: Sequence[Team] = (Team(),),
        workers: Sequence[str] = ("",),
        live: Mapping[int, Held[T]] | None = None,
        changed: Callable[[Account], None] = lambda account: None,
        wake: Callable[[], None] = lambda: None,
        may_be_lost: bool = False,
    ) -> None:
        """teams: every one learns from every step, its ranks share it; ranks are counted through all teams. workers:
        names of those that generate, empty for the one of a run that has no others. live: the groups that the
        coordinator's snapshot holds as complete. Those that it has dropped since are left out, those that are
        missing here are made again. changed: told how many groups are where, from any thread, inside the lock. wake:
        called when `tickets` may have another answer. may_be_lost: between `take` and the moment in which a rank has
        its groups, so that each tells with `read` what became of them.
        """
        self._coordinator, self._waits, self._changed = coordinator, waits, changed
        self._teams, self._num_ranks = teams, sum(len(team.shares) for team in teams)
        self._wake_tickets = wake
        self._groups = {number: held for number, held in (live or {}).items() if coordinator.holds(number)}
        for number in coordinator.untaken:
            if number not in self._groups:
                coordinator.lose(number)
        # One lock guards the coordinator, the groups, and all down to `_outcome`. Who learns and who generates wait
        # apart: each of the latter asks the coordinator when woken, which is news to the former alone.
        lock = threading.RLock()
        self._lock, self._askers = threading.Condition(lock), threading.Condition(lock)
        self._failure: BaseException | None = None
        self._failed_in_a_row: list[Failure] = []
        self._workers = [_Intake(name, coordinator.step) for name in workers]
        self._worker_of: dict[int, int] = {}
        self._taken_away = set[Ticket]()  # from workers that are gone: what still comes of them is passed over
        self._newcomers = False  # workers wait for weights
        self._telling = set[int]()  # ranks that are still to hear of them
        self._divided_step = -1
        self._num_waiting = 0  # learners inside `take`
        self._num_wakes = 0
        self._judged = Judged()
        self._held = False
        self._stopping = False
        self._portions: dict[int, Portion[T]] = {}
        self._reading = _Reading[T]() if may_be_lost else None
        self._released: set[int] = set()
        self._outcome: Consumed[T] | None = None  # of the last step that all ranks have released

    def tickets(self, worker: int, served: int | None) -> list[Ticket] | None:
        """The groups that this worker is to start now; None where the run has failed. served: the lowest step whose
        weights its engine serves; None where it has none."""
        with self._lock:
            return None if self._is_over(worker) else self._hand_out(worker, served)

    def wait_for_tickets(self, worker: int, served: int | None) -> list[Ticket] | None:
        """The same, once there are any or something has changed that the worker may know better, such as what it
        serves."""
        with self._lock:
            num_wakes = self._num_wakes
            while not self._is_over(worker):
                tickets = self._hand_out(worker, served)
                if tickets or self._num_wakes != num_wakes:
                    return tickets
                self._askers.wait()
            return None

    def put(self, ticket: Ticket, group: T, facts: Facts, measured: Sequence[Measured]) -> None:
        """See `EdgePort`. A group without any verdict counts among those that fail."""
        with self._lock:
            if ticket in self._taken_away:
                return
            self._groups[ticket.number] = Held(group, facts.num_tokens, measured)
            self._coordinator.complete(ticket.number, facts.num_tokens, facts.version)
            self._coordinator.weigh(ticket.number, facts.num_bytes)
            worker = self._ended(ticket)
            if worker is not None:
                worker.holds.add(ticket.number)
            self._count(facts.failure)
            self._tell()
            self._askers.notify_all()
        self._wake_tickets()

    def drop(self, ticket: Ticket, reason: str, failure: Failure | None = None, *, lost: bool = False) -> None:
        """See `EdgePort`."""
        with self._lock:
            if ticket in self._taken_away:
                return
            if not (lost and self._coordinator.retry(ticket.number)):
                if not lost:
                    self._coordinator.drop(ticket.number, reason)
                self._count(failure)
            self._ended(ticket)
            self._tell()
            self._askers.notify_all()
        self._wake_tickets()

    def count(self, judged: Judged) -> None:
        """See `EdgePort`."""
        with self._lock:
            self._judged = Judged.joined([self._judged, judged])

    def lose(self, worker: int) -> int:
        """A worker is gone, and what it made that no step has taken: its groups are handed out again, and what still
        comes of it is passed over. Returns how many they are."""
        with self._lock:
            gone = self._workers[worker]
            gone.takes, gone.gone, gone.served = False, True, None
            groups = [*sorted(gone.running), *sorted(gone.holds)]
            for ticket in gone.running.values():
                self._taken_away.add(ticket)
                self._worker_of.pop(ticket.number)
                if not self._coordinator.retry(ticket.number):
                    self._count(Failure(f"worker {gone.name} died while it worked on it", users=False))
            for number in gone.holds:
                self._coordinator.lose(number)
                del self._groups[number]
            gone.running, gone.given, gone.holds = {}, [], set()
            self._tell()
        self._wake()
        return len(groups)

    def join(self, name: str) -> int:
        """A worker comes in place of one that is gone; its number. It gets tickets once it has asked."""
        with self._lock:
            self._workers.append(_Intake(name, None, takes=False))
            return len(self._workers) - 1

    def tell_of_newcomers(self) -> None:
        """Engines that have come since wait for weights: all ranks that learn hear of it where none has a part of the
        next step yet, so that they can send together what they have."""
        with self._lock:
            self._newcomers = True
            self._lock.notify_all()

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> Portion[T] | Newcomers | None:
        """See `EdgePort`."""
        with self._lock, self._waiting(step):
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._tells(rank):
                    return Newcomers()
                if rank in self._portions:
                    return self._portions.pop(rank)
                if self._coordinator.finished:
                    self._refuse_failures(of_steps=1)
                    return None
                numbers = None if self._telling else self._ready(step, wanted)
                if numbers is not None:
                    self._portions, self._divided_step = self._divided(step, numbers), step
                    continue
                if wanted is not None and self._stalled():
                    self._refuse_failures(of_steps=1)
                    raise NothingToWaitFor(self._why_stalled(wanted))
                if not self._lock.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError(f"not in time: {self._so_far(wanted)}")

    def read(self, step: int, rank: int, lost: Collection[int]) -> bool:
        """The rank has all groups of its portion but those that are lost. Waits until all ranks have told; whether the
        step is whole on all of them. If not, what is lost is made again, and all are to ask for the step again."""
        reading = self._reading
        assert reading is not None, "groups of this edge may be lost"
        with self._lock:
            reading.missing |= {number for number in lost if number in reading.groups}
            reading.ranks.discard(rank)
            if not reading.ranks and reading.whole is None:
                reading.whole = not reading.missing
                self._take_back(reading, step)
            while reading.whole is None:
                if self._failure is not None:
                    raise self._failure
                with self._waits("learner", f"step {step}", on="other ranks"):
                    self._lock.wait()
            return reading.whole

    def release(self, step: int, rank: int, published: bool) -> Consumed[T]:
        """See `EdgePort`."""
        with self._lock:
            self._released.add(rank)
            if len(self._released) == self._num_ranks:
                self._outcome = self._release(step, published)
                self._released.clear()
                self._tell()
                self._wake()
            while self._outcome is None or self._outcome.version.step <= step:
                if self._failure is not None:
                    raise self._failure
                with self._waits("learner", f"release of step {step}", on="other ranks"):
                    self._lock.wait()
            return self._outcome

    def open_data(self) -> None:
        """See `IntakePort`."""
        with self._lock:
            self._coordinator.data_open = True
        self._wake()

    def offer(self, keep: Callable[[int], None]) -> None:
        """See `IntakePort`."""
        with self._lock:
            keep(self._coordinator.offer())
        self._wake()

    def hold(self, held: bool) -> None:
        """See `IntakePort`."""
        with self._lock:
            self._held = held
        self._wake()

    def standing(self) -> Standing:
        """See `IntakePort`."""
        with self._lock:
            coordinator = self._coordinator
            return Standing(coordinator.accounting(), coordinator.num_offered, coordinator.num_owed())

    def stop(self) -> None:
        """The run is to end with the step under way, on all ranks alike."""
        with self._lock:
            self._stopping = True

    def fail(self, failure: BaseException) -> None:
        """One side is gone: the other is told. The first failure counts; later ones follow from it."""
        with self._lock:
            self._failure = self._failure or failure
            self._lock.notify_all()
        self._wake()

    def _tell(self) -> None:
        """Inside the lock: learners look again, and people see how many groups are where."""
        self._lock.notify_all()
        self._changed(self._coordinator.accounting())

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

    def _is_over(self, worker: int) -> bool:
        return self._failure is not None or self._workers[worker].gone

    def _tells(self, rank: int) -> bool:
        """Whether this rank is to hear of newcomers now. Inside the lock."""
        if self._newcomers and self._divided_step < self._coordinator.step:
            self._newcomers, self._telling = False, set(range(self._num_ranks))
        told = rank in self._telling
        self._telling.discard(rank)
        return told

    def _hand_out(self, worker: int, served: int | None) -> list[Ticket]:
        """Inside the lock."""
        mine = self._workers[worker]
        mine.served, mine.takes = served, True
        opens = not self._held and (self._num_waiting >= self._num_ranks or self._coordinator.plan.max_staleness > 0)
        known = [each.served for each in self._workers if each.served is not None]
        for ticket in self._coordinator.take_tickets(min(known, default=None)) if opens else ():
            takers = [number for number, each in enumerate(self._workers) if each.takes]
            chosen = min(takers, key=lambda other: len(self._workers[other].running))
            self._workers[chosen].given.append(ticket)
            self._workers[chosen].running[ticket.number] = ticket
            self._worker_of[ticket.number] = chosen
            if name := self._workers[chosen].name:
                self._coordinator.assign(ticket.number, name)
            self._askers.notify_all()
        tickets, mine.given = mine.given[:_MOST_TICKETS], mine.given[_MOST_TICKETS:]
        self._tell()
        return tickets

    def _ended(self, ticket: Ticket) -> _Intake | None:
        """Who worked on it; None where whoever has the coordinator handed it out."""
        number = self._worker_of.pop(ticket.number, None)
        if number is None:
            return None
        self._workers[number].running.pop(ticket.number)
        return self._workers[number]

    def _divided(self, step: int, numbers: tuple[int, ...]) -> dict[int, Portion[T]]:
        """The groups of a step over the ranks, whole, each mini-batch evened out by tokens."""
        held = [self._groups.pop(number) for number in numbers]
        holders = {number: worker for worker in self._workers for number in worker.holds.intersection(numbers)}
        for worker in self._workers:
            worker.holds.difference_update(numbers)
        metrics = combine([part for each in held for part in each.measured])
        groups = [each.group for each in held]
        loads = [each.num_tokens for each in held]
        places = [place for team in self._teams for place in _places(team, loads, numbers, step)]
        judged = [self._take_judged() for _ in places]
        if self._reading is not None:
            waiting = dict(zip(numbers, held, strict=True))
            self._reading = _Reading(waiting, holders, judged[0], set(range(self._num_ranks)))
        return {
            rank: Portion(
                numbers,
                tuple(numbers[place] for place in own),
                [groups[place] for place in own],
                groups[0],
                metrics,
                judged[rank],
            )
            for rank, own in enumerate(places)
        }

    def _take_back(self, reading: "_Reading[T]", step: int) -> None:
        """All ranks have told. Inside the lock."""
        if not reading.whole:
            self._coordinator.untake()
            self._divided_step = step - 1
            self._judged = Judged.joined([reading.judged, self._judged])
            for number, held in reading.groups.items():
                if number in reading.missing:
                    self._coordinator.lose(number)
                    continue
                self._groups[number] = held
                if number in reading.holders:
                    reading.holders[number].holds.add(number)
        reading.groups, reading.holders = {}, {}
        self._tell()
        self._wake()

    def _take_judged(self) -> Judged:
        judged, self._judged = self._judged, Judged()
        return judged

    def _release(self, step: int, published: bool) -> Consumed[T]:
        version = self._coordinator.release(step, published)
        coordinator = self._coordinator
        return Consumed(
            version,
            coordinator.finished,
            self._stopping,
            coordinator.accounting(),
            coordinator.snapshot(),
            dict(sorted(self._groups.items())),
        )

    def _ready(self, step: int, wanted: int | None) -> tuple[int, ...] | None:
        try:
            return self._coordinator.ready(step) if wanted is None else self._coordinator.part(step, wanted)
        except Exhausted:
            self._refuse_failures(of_steps=1)
            raise

    def _stalled(self) -> bool:
        """Whether no group runs and none will start while this is waited for."""
        return self._coordinator.stalled if not self._held else not self._coordinator.accounting().running

    def _so_far(self, wanted: int | None) -> str:
        account, num_offered = self._coordinator.accounting(), self._coordinator.num_offered
        dropped = ", ".join(f"{count} {reason}" for reason, count in account.dropped.items())
        return (
            f"of the {wanted or self._coordinator.plan.consumer_batch} prompt groups that are waited for "
            f"{self._coordinator.num_untaken} are finished; {account.running} run, {num_offered} submitted ones wait "
            f"to start{f', dropped so far: {dropped}' if dropped else ''}"
        )

    def _why_stalled(self, wanted: int) -> str:
        plan, so_far = self._coordinator.plan, self._so_far(wanted)
        if self._held:
            why = "groups start again after resume()"
        elif not self._coordinator.data_open and not self._coordinator.num_offered:
            why = "submit more, or wait for those that there are"
        else:
            why = (
                f"as many as may run ahead have been started with the weights of version {self._coordinator.step} "
                f"(async.max_staleness={plan.max_staleness}, data.train_batch_size={plan.consumer_batch}, "
                f"{plan.total_steps} steps in all), and others start after publish()"
            )
        failed = f". The last that failed said: {self._failed_in_a_row[-1].message}" if self._failed_in_a_row else ""
        return f"this would wait for ever: {so_far}: {why}{failed}"

    def _wake(self) -> None:
        """Have those who want tickets look again; from any thread."""
        with self._lock:
            self._num_wakes += 1
            self._askers.notify_all()
        self._wake_tickets()

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


def _places(team: Team, loads: Sequence[int], numbers: Sequence[int], step: int) -> Iterator[list[int]]:
    """Of each rank of the team, which of the step's groups it takes."""
    size = team.mini_batch or len(numbers)
    passes = [minibatches(len(numbers), numbers, size, team.seed, step, epoch) for epoch in range(team.epochs)]
    parts = divide_step(loads, passes, max(team.shares) + 1)
    return (parts[share] for share in team.shares)
