"""The sample queue shared by threads, however groups are stored: as batches in one process, as references to them if
workers have processes of their own."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distflow.errors import UserError
from distflow.observe.metrics import Measured, combine
from distflow.rewards.score import RewardCounts
from distflow.runtime.sample_queue.generating_workers import Generator, Generators
from distflow.runtime.sample_queue.pending_groups import (
    Consumed,
    DpGroupShares,
    Facts,
    FailuresInARow,
    PendingGroup,
    Portion,
    places,
)
from distflow.runtime.sample_queue.protocol import Failure, NewWorkers, NoProgress, NothingToWaitFor, Standing
from distflow.runtime.wait_log import Waits
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup
from distflow.scheduling.sample_queue import Exhausted

T = TypeVar("T")


@dataclass
class _Reading(Generic[T]):
    """A step from its division until all ranks have it. groups: all of them, by group id. holders: the workers that
    store them, if these may die. judged: the reward counts sent with it. ranks: that have not reported yet what they
    miss. whole: None until all have."""

    groups: dict[int, PendingGroup[T]] = field(default_factory=dict)
    holders: dict[int, Generator] = field(default_factory=dict)
    judged: RewardCounts = RewardCounts()
    ranks: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    whole: bool | None = None


class SharedSampleQueue(Generic[T]):
    """The coordinator decides; this object only guards it with a lock, stores the groups, and wakes waiting threads.

    Any method may be called on any thread; `take`, `release` and `wait_for_groups` wait. Trainers wait on the lock's
    condition; callers that must not block call `prompt_groups` again when woken.

    A failure on either side is raised on the other, so that nobody waits for a dead process. Groups that fail one after
    another, without a successful one between them, end the run when they would have filled two steps, or one at the end
    of the data.

    At staleness 0 groups are handed out only while every rank waits for a step: nothing generates while a trainer
    updates, validates or saves. Else they are handed out whenever there is capacity. A group goes to the worker with
    the fewest groups.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        waits: Waits,
        dp_groups: Sequence[DpGroupShares] = (DpGroupShares(),),
        workers: Sequence[str] = ("",),
        live: Mapping[int, PendingGroup[T]] | None = None,
        changed: Callable[[GroupCounts], None] = lambda group_counts: None,
        wake: Callable[[], None] = lambda: None,
        may_be_lost: bool = False,
    ) -> None:
        """dp_groups: every one trains on every step, its ranks share it; ranks are numbered through all dp groups.
        workers: names of those that generate, empty if there is only one. live: the complete groups of the
        coordinator's snapshot. Those that it has dropped since are left out, missing ones are generated again. changed:
        called with the counts, from any thread, inside the lock. wake: called when `prompt_groups` may have another
        result. may_be_lost: groups may be lost between `take` and their arrival at a rank, so that each rank reports
        them with `read`.
        """
        self._coordinator, self._waits, self._changed = coordinator, waits, changed
        self._dp_groups, self._num_ranks = dp_groups, sum(len(dp_group.shares) for dp_group in dp_groups)
        self._wake_loop = wake
        self._groups = {number: held for number, held in (live or {}).items() if coordinator.holds(number)}
        for number in coordinator.untaken:
            if number not in self._groups:
                coordinator.lose(number)
        # One lock guards the coordinator, the groups, and all down to `_outcome`. Trainers and generating workers wait
        # on separate conditions: each of the latter asks the coordinator when woken, which concerns the former alone.
        lock = threading.RLock()
        self._lock, self._askers = threading.Condition(lock), threading.Condition(lock)
        self._failure: BaseException | None = None
        self._failures = FailuresInARow(coordinator.plan.consumer_batch)
        self._generators = Generators(workers, coordinator.step)
        self._newcomers = False  # workers wait for weights
        self._telling = set[int]()  # ranks that are still to be informed of them
        self._divided_step = -1
        self._num_waiting = 0  # trainers inside `take`
        self._num_wakes = 0
        self._judged = RewardCounts()
        self._held = False
        self._stopping = False
        self._portions: dict[int, Portion[T]] = {}
        self._reading = _Reading[T]() if may_be_lost else None
        self._released: set[int] = set()
        self._outcome: Consumed[T] | None = None  # of the last step that all ranks have released

    def prompt_groups(self, worker: int, served: int | None) -> list[PromptGroup] | None:
        """The groups that this worker is to start now; None if the run has failed. served: the lowest weight version of
        its engine; None if it has none."""
        with self._lock:
            return None if self._is_over(worker) else self._hand_out(worker, served)

    def wait_for_groups(self, worker: int, served: int | None) -> list[PromptGroup] | None:
        """The same, but waits until there are any, or the worker should call again, perhaps with another version."""
        with self._lock:
            num_wakes = self._num_wakes
            while not self._is_over(worker):
                prompt_groups = self._hand_out(worker, served)
                if prompt_groups or self._num_wakes != num_wakes:
                    return prompt_groups
                self._askers.wait()
            return None

    def put(self, prompt_group: PromptGroup, group: T, facts: Facts, measured: Sequence[Measured]) -> None:
        """See `SampleQueuePort`. A group without any score counts as a failure."""
        with self._lock:
            if self._generators.is_passed_over(prompt_group):
                return
            self._groups[prompt_group.group_id] = PendingGroup(group, facts.num_tokens, measured)
            if facts.accuracy is not None:
                self._coordinator.judged(prompt_group, facts.accuracy)
            self._coordinator.complete(prompt_group.group_id, facts.num_tokens, facts.version)
            self._coordinator.weigh(prompt_group.group_id, facts.num_bytes)
            self._generators.end(prompt_group, complete=True)
            self._count(facts.failure)
            self._tell()
            self._askers.notify_all()
        self._wake_loop()

    def drop(
        self,
        prompt_group: PromptGroup,
        reason: str,
        failure: Failure | None = None,
        *,
        lost: bool = False,
        accuracy: Accuracy | None = None,
    ) -> None:
        """See `SampleQueuePort`."""
        with self._lock:
            if self._generators.is_passed_over(prompt_group):
                return
            if accuracy is not None:
                self._coordinator.judged(prompt_group, accuracy)
            if not (lost and self._coordinator.retry(prompt_group.group_id)):
                if not lost:
                    self._coordinator.drop(prompt_group.group_id, reason)
                self._count(failure)
            self._generators.end(prompt_group, complete=False)
            self._tell()
            self._askers.notify_all()
        self._wake_loop()

    def has_place(self, prompt_group: PromptGroup) -> bool:
        """See `StoppingSampleQueue`."""
        with self._lock:
            return self._coordinator.has_place(prompt_group.group_id)

    def is_full(self) -> bool:
        """See `StoppingSampleQueue`."""
        with self._lock:
            return self._coordinator.is_full

    def abort(self, prompt_groups: Sequence[PromptGroup], num_tokens: int) -> None:
        """See `StoppingSampleQueue`."""
        with self._lock:
            self._coordinator.abort([prompt_group.group_id for prompt_group in prompt_groups], num_tokens)
            for prompt_group in prompt_groups:
                self._generators.end(prompt_group, complete=False)
            self._tell()
            self._askers.notify_all()
        self._wake_loop()

    def count(self, judged: RewardCounts) -> None:
        """See `SampleQueuePort`."""
        with self._lock:
            self._judged = RewardCounts.joined([self._judged, judged])

    def lose(self, worker: int) -> int:
        """A worker is gone, with its groups that no step has taken: they are handed out again, and its late results are
        ignored. Returns their number."""
        with self._lock:
            name, prompt_groups, holds = self._generators.lose(worker)
            for prompt_group in prompt_groups:
                if not self._coordinator.retry(prompt_group.group_id):
                    self._count(Failure(f"worker {name} died while it worked on it", users=False))
            for number in holds:
                self._coordinator.lose(number)
                del self._groups[number]
            self._tell()
        self._wake()
        return len(prompt_groups) + len(holds)

    def join(self, name: str) -> int:
        """A worker replaces one that is gone; returns its number. It gets groups after its first request."""
        with self._lock:
            return self._generators.join(name)

    def tell_of_new_workers(self) -> None:
        """New engines wait for weights: all training ranks are informed when none has a part of the next step yet, so
        that they can send their weights together."""
        with self._lock:
            self._newcomers = True
            self._lock.notify_all()

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> Portion[T] | NewWorkers | None:
        """See `SampleQueuePort`."""
        with self._lock, self._waiting(step):
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._hears_of_new_workers(rank):
                    return NewWorkers()
                if rank in self._portions:
                    return self._portions.pop(rank)
                if self._coordinator.finished:
                    self._failures.refuse(of_steps=1)
                    return None
                numbers = None if self._telling else self._ready(step, wanted)
                if numbers is not None:
                    self._portions, self._divided_step = self._divided(step, numbers), step
                    continue
                if wanted is not None and self._stalled():
                    self._failures.refuse(of_steps=1)
                    raise NothingToWaitFor(self._why_stalled(wanted))
                if not self._lock.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError(f"not in time: {self._so_far(wanted)}")

    def read(self, step: int, rank: int, lost: Collection[int]) -> bool:
        """The rank has all groups of its portion but the lost ones. Waits until all ranks have reported; returns
        whether the step is complete on all of them. If not, lost groups are generated again, and all request the step
        again."""
        reading = self._reading
        assert reading is not None, "groups of this queue may be lost"
        with self._lock:
            reading.missing |= {number for number in lost if number in reading.groups}
            reading.ranks.discard(rank)
            if not reading.ranks and reading.whole is None:
                reading.whole = not reading.missing
                self._take_back(reading, step)
            while reading.whole is None:
                if self._failure is not None:
                    raise self._failure
                with self._waits("training", f"step {step}", on="other ranks"):
                    self._lock.wait()
            return reading.whole

    def release(self, step: int, rank: int, published: bool) -> Consumed[T]:
        """See `SampleQueuePort`."""
        with self._lock:
            self._released.add(rank)
            if len(self._released) == self._num_ranks:
                try:
                    self._outcome = self._release(step, published)
                except UserError as err:  # of a curriculum: all ranks end with it
                    self.fail(err)
                    raise
                self._released.clear()
                self._tell()
                self._wake()
            while self._outcome is None or self._outcome.version.step <= step:
                if self._failure is not None:
                    raise self._failure
                with self._waits("training", f"release of step {step}", on="other ranks"):
                    self._lock.wait()
            return self._outcome

    def open_data(self) -> None:
        """See `IntakePort`."""
        with self._lock:
            self._coordinator.prompt_groups.data_open = True
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
            return Standing(coordinator.checked_counts(), coordinator.prompt_groups.num_waiting, coordinator.num_owed())

    def stop(self) -> None:
        """The run is to end after the current step, on all ranks."""
        with self._lock:
            self._stopping = True

    def fail(self, failure: BaseException) -> None:
        """One side has failed: the other gets the error. The first failure counts; later ones follow from it."""
        with self._lock:
            self._failure = self._failure or failure
            self._lock.notify_all()
        self._wake()

    def _tell(self) -> None:
        """Inside the lock: trainers check again, and the counts are shown."""
        self._lock.notify_all()
        self._changed(self._coordinator.checked_counts())

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """A rank waits for a step: groups may be handed out. Inside the lock, which is released while waiting."""
        self._num_waiting += 1
        self._wake()
        try:
            with self._waits("training", f"step {step}", on="rollout"):
                yield
        finally:
            self._num_waiting -= 1

    def _is_over(self, worker: int) -> bool:
        return self._failure is not None or self._generators.is_gone(worker)

    def _hears_of_new_workers(self, rank: int) -> bool:
        """Whether this rank is to be informed of new workers now. Inside the lock."""
        if self._newcomers and self._divided_step < self._coordinator.step:
            self._newcomers, self._telling = False, set(range(self._num_ranks))
        hears = rank in self._telling
        self._telling.discard(rank)
        return hears

    def _hand_out(self, worker: int, served: int | None) -> list[PromptGroup]:
        """Inside the lock."""
        oldest = self._generators.ask(worker, served)
        if not self._held and (self._num_waiting >= self._num_ranks or self._coordinator.plan.max_staleness > 0):
            for prompt_group in self._coordinator.take_groups(oldest):
                if name := self._generators.give(prompt_group):
                    self._coordinator.assign(prompt_group.group_id, name)
                self._askers.notify_all()
        prompt_groups = self._generators.fetch(worker)
        self._tell()
        return prompt_groups

    def _divided(self, step: int, numbers: tuple[int, ...]) -> dict[int, Portion[T]]:
        """The groups of a step divided among the ranks, whole, each mini-batch balanced by tokens."""
        held = [self._groups.pop(number) for number in numbers]
        holders = self._generators.take(numbers)
        metrics = combine([part for each in held for part in each.measured])
        groups = [each.group for each in held]
        loads = [each.num_tokens for each in held]
        owned = [own for dp_group in self._dp_groups for own in places(dp_group, loads, numbers, step)]
        judged = [self._take_judged() for _ in owned]
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
            for rank, own in enumerate(owned)
        }

    def _take_back(self, reading: "_Reading[T]", step: int) -> None:
        """All ranks have reported. Inside the lock."""
        if not reading.whole:
            self._coordinator.untake()
            self._divided_step = step - 1
            self._judged = RewardCounts.joined([reading.judged, self._judged])
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

    def _take_judged(self) -> RewardCounts:
        judged, self._judged = self._judged, RewardCounts()
        return judged

    def _release(self, step: int, published: bool) -> Consumed[T]:
        version = self._coordinator.release(step, published)
        coordinator = self._coordinator
        return Consumed(
            version,
            coordinator.finished,
            self._stopping,
            coordinator.checked_counts(),
            coordinator.snapshot(),
            dict(sorted(self._groups.items())),
            coordinator.shares.figures,
        )

    def _ready(self, step: int, wanted: int | None) -> tuple[int, ...] | None:
        try:
            return self._coordinator.ready(step) if wanted is None else self._coordinator.part(step, wanted)
        except Exhausted:
            self._failures.refuse(of_steps=1)
            raise

    def _stalled(self) -> bool:
        """Whether no group runs and none will start during the wait."""
        return self._coordinator.stalled if not self._held else not self._coordinator.checked_counts().running

    def _so_far(self, wanted: int | None) -> str:
        group_counts, num_offered = self._coordinator.checked_counts(), self._coordinator.prompt_groups.num_waiting
        dropped = ", ".join(f"{count} {reason}" for reason, count in group_counts.dropped.items())
        awaited = wanted or self._coordinator.plan.consumer_batch
        return (
            f"{self._coordinator.num_untaken} of {awaited} awaited prompt groups are finished; "
            f"{group_counts.running} are running, {num_offered} submitted ones wait to start"
            f"{f', dropped so far: {dropped}' if dropped else ''}"
        )

    def _why_stalled(self, wanted: int) -> str:
        plan, so_far = self._coordinator.plan, self._so_far(wanted)
        if self._held:
            why = "groups start again after resume()"
        elif not self._coordinator.prompt_groups.data_open and not self._coordinator.prompt_groups.num_waiting:
            why = "submit more, or wait for fewer"
        else:
            why = (
                f"all groups that staleness allows have been started with weight version {self._coordinator.step} "
                f"(async.max_staleness={plan.max_staleness}, data.train_batch_size={plan.consumer_batch}, "
                f"{plan.total_steps} steps in all), and others start after publish()"
            )
        failed = f". The last that failed said: {self._failures.last}" if self._failures.last else ""
        return f"this would wait for ever: {so_far}: {why}{failed}"

    def _wake(self) -> None:
        """Have waiting workers check again; from any thread."""
        with self._lock:
            self._num_wakes += 1
            self._askers.notify_all()
        self._wake_loop()

    def _count(self, failure: Failure | None) -> None:
        """The error that then ends the run is raised in `take`: here, on the asyncio thread, it would only end one
        group's task."""
        try:
            self._failures.count(failure)
        except NoProgress as err:
            self._failure = self._failure or err
