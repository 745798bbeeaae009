"""The sample queue shared by threads, however groups are stored: as batches within one process, or
as references to them if workers have separate processes."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Generic, TypeVar

from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.observe.metrics import combine
from distflow.observe.writing.timing import RANKS, Waits
from distflow.rewards.reward_results import RewardCounts
from distflow.runtime.dp_groups import DpGroupShares, divide_among_ranks
from distflow.runtime.error_limits import FailuresInARow
from distflow.runtime.run_errors import Failure, NoProgress
from distflow.runtime.sample_queue import protocol
from distflow.runtime.sample_queue.submissions import (
    NothingToWaitFor,
    OfGroup,
    Standing,
    Submissions,
)
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.group_states import PromptGroup
from distflow.scheduling.groups_by_rollout_worker import GroupsByWorker, RolloutWorker
from distflow.scheduling.sample_queue import Exhausted

T = TypeVar("T")


@dataclass
class _Reading(Generic[T]):
    """A step from its division until all ranks have it."""

    groups: dict[int, protocol.FinishedGroup[T]] = field(default_factory=dict)
    """By group id."""
    stored_by: dict[int, RolloutWorker] = field(default_factory=dict)
    """The workers that store them."""
    reward_counts: RewardCounts = RewardCounts()
    """Those sent with the step."""
    ranks: set[int] = field(default_factory=set)
    """Those that have not yet reported what they miss."""
    missing: set[int] = field(default_factory=set)
    whole: bool | None = None
    """None until all have reported."""


def joined(
    taken: protocol.TrainingStep[Sequence[T]], groups: Batch
) -> protocol.TrainingStep[Batch]:
    """A rank's part with the rows of its groups; no rows if it has no groups."""
    batch = groups if taken.own else groups.select([])
    own = taken.own
    counts = taken.reward_counts
    return protocol.TrainingStep(taken.group_ids, own, batch, taken.metrics, counts)


class SharedSampleQueue(Generic[T]):
    """The methods of `SampleQueuePort` that do not depend on the transport. The coordinator
    decides; this object only guards it with a lock, stores groups, and wakes waiting threads.

    Any method may be called on any thread; `take_step`, `release` and `wait_for_groups` wait.
    Trainers wait on the lock's condition; callers that must not block call `groups_for` again when
    woken (`_wake_loop`).

    A failure on either side is raised on the other, so that nobody waits for a dead process.
    Consecutive failures of groups end the run when they would have filled two steps, or one at the
    end of the data.

    At staleness 0 groups are handed out only while every rank waits for a step: nothing generates
    while a trainer updates, validates or saves. Otherwise they are handed out whenever there is
    capacity. A group goes to the worker with the fewest groups.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        waits: Waits,
        dp_groups: Sequence[DpGroupShares] = (DpGroupShares(),),
        workers: Sequence[str] = ("",),
        queued: Mapping[int, protocol.FinishedGroup[T]] | None = None,
        may_be_lost: bool = False,
    ) -> None:
        """dp_groups: each trains on every step, which its ranks share; ranks are numbered through
        all dp groups. workers: names of those that generate; empty if there is only one. queued:
        the complete groups of the coordinator's snapshot. Those dropped since are left out; missing
        ones are generated again. may_be_lost: groups may be lost between `take_step` and their
        arrival at a rank, so that each rank reports them with `read`.
        """
        self._coordinator = coordinator
        self._waits = waits
        self._dp_groups = dp_groups
        self._num_ranks = sum(len(dp_group.shares) for dp_group in dp_groups)
        self._groups = {
            number: group
            for number, group in (queued or {}).items()
            if coordinator.queue.holds(number)
        }

        for number in coordinator.queue.untaken:
            if number not in self._groups:
                coordinator.lose(number)

        self._num_releases = self._num_ranks  # of a step

        # One lock guards the coordinator, the groups, and everything below. Trainers and rollout
        # workers wait on separate conditions: each rollout worker asks the coordinator when woken,
        # which does not concern trainers.
        lock = threading.RLock()
        self._lock = threading.Condition(lock)
        self._askers = threading.Condition(lock)
        self._failure: BaseException | None = None
        self._failures = FailuresInARow(coordinator.plan.consumer_batch)
        self._workers = GroupsByWorker(workers, coordinator.step)
        self._new_workers_wait = False  # for weights
        self._uninformed_ranks = set[int]()  # ranks still to be informed of them
        self._divided_step = -1
        self._taken_step = -1
        """The last step that all ranks have, with the samples of their parts."""
        self._num_waiting = 0  # trainers inside `take_step`
        self._num_wakes = 0
        self._reward_counts = RewardCounts()
        self._paused = False
        self.submissions = Submissions()
        self._stopping = False
        self._parts: dict[int, protocol.TrainingStep[Sequence[T]]] = {}  # by rank
        self._reading = _Reading[T]() if may_be_lost else None
        self._released_by: set[int] = set()

        # of the last step that all ranks have released
        self._released: protocol.Released | None = None
        self._resume_point: protocol.ResumePoint[T] | None = protocol.ResumePoint(
            coordinator.snapshot(), {**self._groups}
        )

    def groups_for(self, worker: int, engine_version: int | None) -> list[PromptGroup] | None:
        """The groups that this worker is to start now; None if the run has failed. engine_version:
        the lowest weight version of its engine, or None."""
        with self._lock:
            if self._is_over(worker):
                return None
            return self._hand_out(worker, engine_version)

    def wait_for_groups(self, worker: int, engine_version: int | None) -> list[PromptGroup] | None:
        """As `groups_for`, but waits until there are groups or the worker should call again, e.g.
        with another version."""
        with self._lock:
            num_wakes = self._num_wakes
            while not self._is_over(worker):
                prompt_groups = self._hand_out(worker, engine_version)
                if prompt_groups or self._num_wakes != num_wakes:
                    return prompt_groups
                self._askers.wait()

            self._askers.notify()  # the next one: what woke this worker may concern it
            return None

    def end_groups(self, ended: protocol.EndedGroups[T]) -> None:
        """See `RolloutQueue`. Late results of lost workers are ignored."""
        with self._lock:
            if isinstance(ended, protocol.FinishedGroup):
                self._complete(ended)
            elif isinstance(ended, protocol.LoadedGroups):
                self._complete_loaded(ended)
            elif isinstance(ended, protocol.DroppedGroup):
                self._drop(ended)
            else:
                self._abort(ended)

            self._lock.notify_all()
            self._wake_asker()

        self._wake_loop()

    def _complete(self, finished: protocol.FinishedGroup[T]) -> None:
        group_id = finished.prompt_group.group_id
        if self._workers.is_passed_over(group_id, finished.prompt_group.attempt):
            return

        self._groups[group_id] = finished
        self._coordinator.complete(group_id, finished.num_tokens, finished.version, finished.score)
        self._coordinator.weigh(group_id, finished.num_bytes)
        self._workers.end(group_id, complete=True)
        self._count(finished.failure)

    def _complete_loaded(self, loaded: protocol.LoadedGroups[T]) -> None:
        num_tokens = {}
        for group in loaded.finished:
            group_id = group.prompt_group.group_id
            if not self._workers.is_passed_over(group_id, group.prompt_group.attempt):
                self._groups[group_id] = group
                num_tokens[group_id] = group.num_tokens

        self._coordinator.complete_all(num_tokens)
        for group_id in num_tokens:
            if loaded.num_bytes:
                self._coordinator.weigh(group_id, self._groups[group_id].num_bytes)
            self._workers.end(group_id, complete=True)

        self._count(None)

    def _drop(self, dropped: protocol.DroppedGroup) -> None:
        group_id = dropped.prompt_group.group_id
        if self._workers.is_passed_over(group_id, dropped.prompt_group.attempt):
            return

        if not (dropped.lost and self._coordinator.retry(group_id)):
            if not dropped.lost:
                self._coordinator.drop(group_id, dropped.reason, dropped.score)
            self._count(dropped.failure)

        self._workers.end(group_id, complete=False)

    def _abort(self, aborted: protocol.AbortedGroups) -> None:
        group_ids = []
        for group_id, attempt in aborted.attempts.items():
            if not self._workers.is_passed_over(group_id, attempt):
                group_ids.append(group_id)

        self._coordinator.abort(group_ids)
        for group_id in group_ids:
            self._workers.end(group_id, complete=False)

    def count(self, reward_counts: RewardCounts) -> None:
        with self._lock:
            self._reward_counts = RewardCounts.joined([self._reward_counts, reward_counts])

    def lose_worker(self, worker: int) -> int:
        """Remove a lost worker: its groups that no step has taken are handed out again, and its
        late results are ignored. Returns their number."""
        with self._lock:
            name, running, stored = self._workers.lose(worker)
            for group_id in running:
                if not self._coordinator.retry(group_id):
                    self._count(Failure(f"worker {name} died while it worked on it", users=False))

            for group_id in stored:
                self._coordinator.lose(group_id)
                del self._groups[group_id]

            self._lock.notify_all()

        self._wake()
        return len(running) + len(stored)

    def add_worker(self, name: str) -> int:
        """Add a replacement for a lost worker; returns its number. It gets groups after its first
        request."""
        with self._lock:
            return self._workers.join(name)

    def announce_new_workers(self) -> None:
        """Announce engines that wait for weights: all training ranks are informed while none has a
        part of the next step, so that they can send their weights together."""
        with self._lock:
            self._new_workers_wait = True
            self._lock.notify_all()

    def take_step(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> protocol.TrainingStep[Sequence[T]] | protocol.NewWorkers | None:
        """See `SampleQueuePort.take`; the batch is a list of groups."""
        with self._lock, self._waiting(step):
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._must_hear_of_new_workers(rank, in_parts=wanted is not None):
                    return protocol.NewWorkers()
                if rank in self._parts:
                    return self._parts.pop(rank)
                if self._coordinator.finished:
                    self._failures.refuse(of_steps=1)
                    return None

                numbers = None if self._uninformed_ranks else self._ready(step, wanted)
                if numbers is not None:
                    self._parts = self._divided(step, numbers)
                    self._divided_step = step
                    continue

                if wanted is not None and self._stalled():
                    self._failures.refuse(of_steps=1)
                    raise NothingToWaitFor(self._why_stalled(wanted))
                if not self._lock.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError(f"not in time: {self._so_far(wanted)}")

    def read(self, step: int, rank: int, lost: Collection[int]) -> bool:
        """Report that the rank has all groups of its part except the lost ones. Waits until all
        ranks have reported; returns whether the step is complete on all of them. If not, lost
        groups are regenerated, and all ranks request the step again."""
        with self._lock:
            reading = self._reading
            assert reading is not None, "groups of this queue may be lost"
            if step != self._divided_step:  # no rank waited for the others' reports
                return True

            reading.missing |= {number for number in lost if number in reading.groups}
            reading.ranks.discard(rank)

            if not reading.ranks and reading.whole is None:
                reading.whole = not reading.missing
                self._take_back(reading, step)

            while reading.whole is None:
                if self._failure is not None:
                    raise self._failure
                with self._waits("training", f"step {step + 1}", on=RANKS):
                    self._lock.wait()

            return reading.whole

    def release(self, step: int, rank: int, sent_weights: bool) -> protocol.Released:
        with self._lock:
            self._released_by.add(rank)
            if len(self._released_by) == self._num_releases:
                coordinator = self._coordinator
                version = coordinator.release(step, sent_weights)
                self._resume_point = protocol.ResumePoint(
                    coordinator.snapshot(), dict(sorted(self._groups.items()))
                )
                live = (group.row for group in coordinator.queue.live)
                self.submissions.keep({*live, *coordinator.prompt_groups.offered})
                counts = coordinator.checked_counts()
                self._released = protocol.Released(
                    version, coordinator.finished, self._stopping, counts, coordinator.due
                )
                self._released_by.clear()
                self._lock.notify_all()
                self._wake()

            while self._released is None or self._released.version.step <= step:
                if self._failure is not None:
                    raise self._failure
                with self._waits("training", f"release of step {step + 1}", on=RANKS):
                    self._lock.wait()

            return self._released

    def end_run(self, why: str) -> None:
        with self._lock:
            self._coordinator.end(why)
            self._resume_point = replace(self.resume_point(), snapshot=self._coordinator.snapshot())

    def resume_point(self) -> protocol.ResumePoint[T]:
        assert self._resume_point is not None, "no step was taken since the last release"
        return self._resume_point

    def open_data(self, of_group: OfGroup) -> None:
        """Let groups of the data set start whenever there is capacity. of_group: for those that
        start or finish from now on."""
        with self._lock:
            self._coordinator.prompt_groups.data_open = True
            self.submissions.of_data = of_group
        self._wake()

    def offer(self, row: PromptRow, of_group: OfGroup) -> None:
        """Offer a caller's row, which waits for capacity."""
        with self._lock:
            self.submissions.add(self._coordinator.offer(), row, of_group)
        self._wake()

    def pause(self, paused: bool) -> None:
        """While paused, no further group starts; running ones continue."""
        with self._lock:
            self._paused = paused
        self._wake()

    def standing(self) -> Standing:
        with self._lock:
            coordinator = self._coordinator
            queue = coordinator.queue
            num_offered = coordinator.prompt_groups.num_waiting
            return Standing(
                coordinator.checked_counts(), queue.num_waiting, num_offered, queue.num_owed()
            )

    def stop(self) -> None:
        """Request the run to end after the current step, on all ranks."""
        with self._lock:
            self._stopping = True

    def fail(self, failure: BaseException) -> None:
        """Pass a failure of one side to the other. The first failure counts; later ones follow from
        it."""
        with self._lock:
            self._failure = self._failure or failure
            self._lock.notify_all()
        self._wake()

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """Marks that a rank waits for a step, so that groups may be handed out. Inside the lock,
        which it releases."""
        self._num_waiting += 1
        self._wake()

        try:
            with self._waits("training", f"step {step + 1}", on="rollout"):
                yield
        finally:
            self._num_waiting -= 1

    def _is_over(self, worker: int) -> bool:
        return self._failure is not None or self._workers.is_gone(worker)

    def _must_hear_of_new_workers(self, rank: int, in_parts: bool) -> bool:
        """Whether to inform this rank of new workers now. in_parts: also within a step. Not after
        the last step, whose end some ranks may know already: those would not send with the others.
        Inside the lock."""
        may_begin = not self._coordinator.finished and (
            in_parts or self._divided_step < self._coordinator.step
        )
        if self._new_workers_wait and may_begin:
            self._new_workers_wait = False
            self._uninformed_ranks = set(range(self._num_ranks))

        uninformed = rank in self._uninformed_ranks
        self._uninformed_ranks.discard(rank)
        return uninformed

    def _hand_out(self, worker: int, engine_version: int | None) -> list[PromptGroup]:
        """Inside the lock."""
        oldest = self._workers.ask(worker, engine_version)
        if not self._paused and (
            self._num_waiting >= self._num_ranks or self._coordinator.plan.max_staleness > 0
        ):
            worker_of = {}
            for prompt_group in self._coordinator.issue_groups(oldest):
                if name := self._workers.assign(prompt_group.group_id, prompt_group.attempt):
                    worker_of[prompt_group.group_id] = name
            self._coordinator.assign(worker_of)
            self._askers.notify_all()

        fetched = self._workers.fetch(worker)
        prompt_groups = [self._coordinator.queue.prompt_group(group_id) for group_id in fetched]
        self._lock.notify_all()
        loads_rows = self._coordinator.plan.loads_rows
        if prompt_groups or not loads_rows or self._taken_step != self._coordinator.step:
            return prompt_groups

        foreseen = self._coordinator.foresee()

        return protocol.ForeseenGroups(self._workers.foresee(worker, self._taken_step, foreseen))

    def _wake_asker(self) -> None:
        """After a group has ended: one waiting worker starts what may start, and then wakes the
        others. If all woke for each group, that would take a time in proportion to the square of
        their number. Inside the lock."""
        if self._failure is None:
            self._askers.notify()
        else:
            self._askers.notify_all()

    def _divided(
        self, step: int, numbers: tuple[int, ...]
    ) -> dict[int, protocol.TrainingStep[Sequence[T]]]:
        """The groups of a step divided among the ranks, whole, each mini-batch balanced by
        tokens."""
        groups = {number: self._groups.pop(number) for number in numbers}
        stored_by = self._workers.take(numbers)
        metrics = combine(list(chain.from_iterable(group.measured for group in groups.values())))
        loads = [group.num_tokens for group in groups.values()]
        divided = list[Sequence[int]]()
        for dp_group in self._dp_groups:
            divided += divide_among_ranks(dp_group, loads, numbers, step)

        reward_counts = self._reward_counts
        self._reward_counts = RewardCounts()
        if self._reading is not None:
            self._reading = _Reading(groups, stored_by, reward_counts, set(range(self._num_ranks)))

        parts = {}
        for rank, indices in enumerate(divided):
            own = tuple(numbers[index] for index in indices)
            data = self._data_of([groups[number] for number in own or numbers[:1]])
            counts = reward_counts if rank == 0 else RewardCounts()
            own_loads = tuple(loads[index] for index in indices)
            parts[rank] = protocol.TrainingStep[Sequence[T]](
                numbers, own, data, metrics, counts, loads=own_loads
            )

        return parts

    def _data_of(self, groups: Sequence[protocol.FinishedGroup[T]]) -> Sequence[T]:
        return [group.data for group in groups]

    def _take_back(self, reading: "_Reading[T]", step: int) -> None:
        """Return lost groups after all ranks have reported. Inside the lock."""
        if reading.whole:
            self._taken_step = step
        else:
            self._coordinator.queue.untake(reading.groups)
            self._divided_step = step - 1
            self._reward_counts = RewardCounts.joined([reading.reward_counts, self._reward_counts])

            for number, group in reading.groups.items():
                if number in reading.missing:
                    self._coordinator.lose(number)
                    continue
                self._groups[number] = group
                if number in reading.stored_by:
                    reading.stored_by[number].stored.add(number)

        reading.groups = {}
        reading.stored_by = {}
        self._lock.notify_all()
        self._wake()

    def _ready(self, step: int, wanted: int | None) -> tuple[int, ...] | None:
        try:
            if wanted is None:
                return self._coordinator.ready(step)
            return self._coordinator.part(step, wanted)
        except Exhausted:
            self._failures.refuse(of_steps=1)
            raise

    def _stalled(self) -> bool:
        """Whether no group is running and none will start during the wait."""
        if not self._paused:
            return self._coordinator.stalled
        return not self._coordinator.checked_counts().running

    def _so_far(self, wanted: int | None) -> str:
        group_counts = self._coordinator.checked_counts()
        num_again = self._coordinator.queue.num_waiting
        num_offered = self._coordinator.prompt_groups.num_waiting + num_again
        dropped = ", ".join(f"{count} {reason}" for reason, count in group_counts.dropped.items())
        awaited = wanted or self._coordinator.plan.consumer_batch

        return (
            f"{self._coordinator.queue.num_untaken} of {awaited} awaited prompt groups are "
            f"finished; {group_counts.running - num_again} are running, {num_offered} submitted "
            f"ones wait to start{f', dropped so far: {dropped}' if dropped else ''}"
        )

    def _why_stalled(self, wanted: int) -> str:
        groups = self._coordinator.prompt_groups
        if self._paused:
            why = "groups start only after resume()"
        elif not (groups.data_open or groups.num_waiting or self._coordinator.queue.num_waiting):
            why = "submit more, or wait for fewer"
        else:
            why = (
                "all groups that async.max_staleness and the number of steps allow have been "
                f"started with weight version {self._coordinator.step}, and further groups start "
                "after publish()"
            )

        last = self._failures.last
        failed = f". The last that failed said: {last}" if last else ""
        return f"this would wait forever: {self._so_far(wanted)}: {why}{failed}"

    def _wake(self) -> None:
        """Make waiting workers check again; callable from any thread."""
        with self._lock:
            self._num_wakes += 1
            self._askers.notify_all()
        self._wake_loop()

    def _wake_loop(self) -> None:
        """Called outside the lock when `groups_for` may return another result."""

    def _count(self, failure: Failure | None) -> None:
        """Count a result. The error that ends the run is raised in `take`: here, on the asyncio
        thread, it would end only one group's task."""
        try:
            self._failures.count(failure)
        except NoProgress as err:
            self._failure = self._failure or err
