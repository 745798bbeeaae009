"""The sample queue as threads share it, whatever the groups are held as: batches in one process, references to them
where workers have processes of their own."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distflow.errors import UserError
from distflow.observe.metrics import Measured, combine
from distflow.rewards.call_counts import RewardCounts
from distflow.runtime.sample_queue.generator_states import Generator, Generators
from distflow.runtime.sample_queue.pending_groups import Consumed, Facts, FailuresInARow, Held, Portion, Team, places
from distflow.runtime.sample_queue.protocol import Failure, NewWorkers, NoProgress, NothingToWaitFor, Standing
from distflow.runtime.wait_log import Waits
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup
from distflow.scheduling.sample_queue import Exhausted

T = TypeVar("T")


@dataclass
class _Reading(Generic[T]):
    """A step between its division and the moment in which all ranks have it. groups: all of them, by group. holders:
    with whom they lie, where that may die. judged: told with it. ranks: that have not said yet what they miss. whole:
    None until all have."""

    groups: dict[int, Held[T]] = field(default_factory=dict)
    holders: dict[int, Generator] = field(default_factory=dict)
    judged: RewardCounts = RewardCounts()
    ranks: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    whole: bool | None = None


class SharedSampleQueue(Generic[T]):
    """The coordinator decides; this object only guards it with a lock, holds the groups, and wakes who waits.

    Any method may be called on any thread; `take`, `release` and `wait_for_groups` wait. Learners wait on the lock's
    condition; whoever must not block asks `prompt_groups` again when he is woken.

    A failure on either side is raised on the other, so that nobody waits for what is gone. Groups that fail one after
    another, with none between them that came through, end the run when they would have filled two steps, or one where
    the data end.

    At staleness 0 groups are handed out only while every rank waits for a step: nothing generates while a trainer
    updates, validates or saves. Else they are handed out whenever there is a credit. A group goes to the worker that
    has the fewest groups.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        waits: Waits,
        dp_groups: Sequence[Team] = (Team(),),
        workers: Sequence[str] = ("",),
        live: Mapping[int, Held[T]] | None = None,
        changed: Callable[[GroupCounts], None] = lambda group_counts: None,
        wake: Callable[[], None] = lambda: None,
        may_be_lost: bool = False,
    ) -> None:
        """teams: every one learns from every step, its ranks share it; ranks are counted through all teams. workers:
        names of those that generate, empty for the one of a run that has no others. live: the groups that the
        coordinator's snapshot holds as complete. Those that it has dropped since are left out, those that are missing
        here are made again. changed: told how many groups are where, from any thread, inside the lock. wake: called
        when `prompt_groups` may have another answer. may_be_lost: between `take` and the moment in which a rank has its
        groups, so that each tells with `read` what became of them.
        """
        self._coordinator, self._waits, self._changed = coordinator, waits, changed
        self._teams, self._num_ranks = dp_groups, sum(len(dp_group.shares) for dp_group in dp_groups)
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
        self._failures = FailuresInARow(coordinator.plan.consumer_batch)
        self._generators = Generators(workers, coordinator.step)
        self._newcomers = False  # workers wait for weights
        self._telling = set[int]()  # ranks that are still to hear of them
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
        """The groups that this worker is to start now; None where the run has failed. served: the lowest step whose
        weights its engine serves; None where it has none."""
        with self._lock:
            return None if self._is_over(worker) else self._hand_out(worker, served)

    def wait_for_groups(self, worker: int, served: int | None) -> list[PromptGroup] | None:
        """The same, once there are any or something has changed that the worker may know better, such as what it
        serves."""
        with self._lock:
            num_wakes = self._num_wakes
            while not self._is_over(worker):
                prompt_groups = self._hand_out(worker, served)
                if prompt_groups or self._num_wakes != num_wakes:
                    return prompt_groups
                self._askers.wait()
            return None

    def put(self, prompt_group: PromptGroup, group: T, facts: Facts, measured: Sequence[Measured]) -> None:
        """See `SampleQueuePort`. A group without any verdict counts among those that fail."""
        with self._lock:
            if self._generators.is_passed_over(prompt_group):
                return
            self._groups[prompt_group.group_id] = Held(group, facts.num_tokens, measured)
            if facts.accuracy is not None:
                self._coordinator.judged(prompt_group, facts.accuracy)
            self._coordinator.complete(prompt_group.group_id, facts.num_tokens, facts.version)
            self._coordinator.weigh(prompt_group.group_id, facts.num_bytes)
            self._generators.end(prompt_group, complete=True)
            self._count(facts.failure)
            self._tell()
            self._askers.notify_all()
        self._wake_tickets()

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
        self._wake_tickets()

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
        self._wake_tickets()

    def count(self, judged: RewardCounts) -> None:
        """See `SampleQueuePort`."""
        with self._lock:
            self._judged = RewardCounts.joined([self._judged, judged])

    def lose(self, worker: int) -> int:
        """A worker is gone, and what it made that no step has taken: its groups are handed out again, and what still
        comes of it is passed over. Returns how many they are."""
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
        """A worker comes in place of one that is gone; its number. It gets groups once it has asked."""
        with self._lock:
            return self._generators.join(name)

    def tell_of_new_workers(self) -> None:
        """Engines that have come since wait for weights: all ranks that learn hear of it where none has a part of the
        next step yet, so that they can send together what they have."""
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
                if self._tells(rank):
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
                except UserError as err:  # of a curriculum: all ranks end by it
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
        """Inside the lock: trainers look again, and people see how many groups are where."""
        self._lock.notify_all()
        self._changed(self._coordinator.checked_counts())

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """A step is waited for: groups may be handed out. Inside the lock, which waiting gives back meanwhile."""
        self._num_waiting += 1
        self._wake()
        try:
            with self._waits("training", f"step {step}", on="rollout"):
                yield
        finally:
            self._num_waiting -= 1

    def _is_over(self, worker: int) -> bool:
        return self._failure is not None or self._generators.is_gone(worker)

    def _tells(self, rank: int) -> bool:
        """Whether this rank is to hear of newcomers now. Inside the lock."""
        if self._newcomers and self._divided_step < self._coordinator.step:
            self._newcomers, self._telling = False, set(range(self._num_ranks))
        told = rank in self._telling
        self._telling.discard(rank)
        return told

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
        """The groups of a step over the ranks, whole, each mini-batch evened out by tokens."""
        held = [self._groups.pop(number) for number in numbers]
        holders = self._generators.take(numbers)
        metrics = combine([part for each in held for part in each.measured])
        groups = [each.group for each in held]
        loads = [each.num_tokens for each in held]
        owned = [own for dp_group in self._teams for own in places(dp_group, loads, numbers, step)]
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
        """All ranks have told. Inside the lock."""
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
        """Whether no group runs and none will start while this is waited for."""
        return self._coordinator.stalled if not self._held else not self._coordinator.checked_counts().running

    def _so_far(self, wanted: int | None) -> str:
        group_counts, num_offered = self._coordinator.checked_counts(), self._coordinator.prompt_groups.num_waiting
        dropped = ", ".join(f"{count} {reason}" for reason, count in group_counts.dropped.items())
        return (
            f"of the {wanted or self._coordinator.plan.consumer_batch} prompt groups that are waited for "
            f"{self._coordinator.num_untaken} are finished; {group_counts.running} run, {num_offered} submitted ones "
            f"wait to start{f', dropped so far: {dropped}' if dropped else ''}"
        )

    def _why_stalled(self, wanted: int) -> str:
        plan, so_far = self._coordinator.plan, self._so_far(wanted)
        if self._held:
            why = "groups start again after resume()"
        elif not self._coordinator.prompt_groups.data_open and not self._coordinator.prompt_groups.num_waiting:
            why = "submit more, or wait for those that there are"
        else:
            why = (
                f"as many as may run ahead have been started with the weights of version {self._coordinator.step} "
                f"(async.max_staleness={plan.max_staleness}, data.train_batch_size={plan.consumer_batch}, "
                f"{plan.total_steps} steps in all), and others start after publish()"
            )
        failed = f". The last that failed said: {self._failures.last}" if self._failures.last else ""
        return f"this would wait for ever: {so_far}: {why}{failed}"

    def _wake(self) -> None:
        """Have those who want groups look again; from any thread."""
        with self._lock:
            self._num_wakes += 1
            self._askers.notify_all()
        self._wake_tickets()

    def _count(self, failure: Failure | None) -> None:
        """What then ends the run is raised in `take`: here, on the asyncio thread, it would end one group's task and
        nobody would hear of it."""
        try:
            self._failures.count(failure)
        except NoProgress as err:
            self._failure = self._failure or err
