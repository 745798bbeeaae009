"""Decides which prompt groups may start now, by rollout capacity, slots of the steps, generation
budget and memory.

Staleness is bounded here, by admission, not by dropping groups later.
"""

from collections.abc import Callable
from functools import partial
from math import ceil

from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.group_states import CountsError
from distflow.scheduling.sample_queue import SampleQueue


def rollout_capacity(
    max_concurrent: int,
    running: int,
    max_staleness: int,
    version: int,
    consumer_batch: int,
    accepted: int,
) -> int:
    """Groups that may start now (AReaL, arXiv 2505.24298, its rule for bounded staleness).

    max_concurrent: groups that may run at once. running: groups that run, except lost ones that
    wait to be issued again. version: the lowest of the engines that may run the group, not the
    trainer's. accepted: `consumer_batch` for each consumed step, short or not, plus complete groups
    that are not consumed, and empty slots of a formed short step.

    At staleness 0 groups start in waves: none while a group of the last wave runs. Which groups
    share an engine batch then depends only on the ledger, not on which finished first, and a
    resumed run repeats it.
    """
    if max_staleness == 0 and running:
        return 0
    admitted = (max_staleness + version + 1) * consumer_batch - (accepted + running)
    return max(0, min(max_concurrent - running, admitted))


class GenerationBudget:
    """Counts the groups of each class, i.e. with the same due step.

    A class covers the steps after the previous class up to its own due step (the first one, all
    from `next_step` on), and may have `per_slot` groups for each slot of these steps. At staleness
    0 each step is a class of its own."""

    def __init__(self, per_slot: int, next_step: int, slots: Callable[[int], int]) -> None:
        """slots: gives the number of slots of all steps from `next_step` to a given one."""
        self._per_slot = per_slot
        self._slots = slots
        self._due = next_step - 1
        self._num_covered = self._left = 0

    def room(self, due: int) -> int:
        """Groups with this due step that may still be issued."""
        if due > self._due:
            return self._per_slot * (self._slots(due) - self._num_covered)
        return self._left

    def issue(self, due: int) -> None:
        """Count an issued group; the first one of a class begins it."""
        # below 0 if more groups were aborted before than the class may have
        self._left = self.room(due) - 1
        self._due = max(self._due, due)
        self._num_covered = max(self._num_covered, self._slots(due))


class MemoryLimit:
    """Counts the bytes of complete groups, and estimates running ones by the mean of earlier
    groups.

    limit_bytes: of all groups, None for no limit. Before any group is known, there is room for
    none; the caller always admits the groups that the next step waits for.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[int, int] = {}
        self._num_weighed = self._num_bytes = 0  # totals of all groups so far

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def weigh(self, number: int, num_bytes: int) -> None:
        """Note the size of a complete group."""
        self._held[number] = num_bytes
        self._num_weighed += 1
        self._num_bytes += num_bytes

    def keep(self, holds: Callable[[int], bool]) -> None:
        """Forget groups that are no longer in the queue."""
        self._held = {
            number: num_bytes for number, num_bytes in self._held.items() if holds(number)
        }

    def left(self, num_running: int) -> int | None:
        """Groups that may start besides those that run, None for any number."""
        if self._limit_bytes is None:
            return None
        if not self._num_bytes:
            return 0

        return max(
            0,
            (self._limit_bytes - self.held_bytes) * self._num_weighed // self._num_bytes
            - num_running,
        )


class Admission:
    """Decides from the state of the queue, without starting anything. Sources are numbered as in
    `plan.sources`.

    In all methods, engine_version is the version to issue groups with, num_left the number of
    groups that may still be made (None for no bound), weights_step the version last sent.
    """

    def __init__(self, plan: DataPlan, queue: SampleQueue) -> None:
        self._plan = plan
        self._queue = queue
        all_at_once = ceil(
            (plan.max_staleness + 1) * plan.consumer_batch * (1 + plan.oversampling)
        ) + len(plan.sources)

        # oversampling is rounded up by source
        self._max_concurrent = plan.max_concurrent or all_at_once
        batches = plan.max_num_gen_batches
        sources = range(0 if batches is None else len(plan.sources))
        self._budgets = [
            GenerationBudget(batches or 0, queue.next_step, partial(queue.quotas.in_all, number))
            for number in sources
        ]
        self.memory = MemoryLimit(plan.max_held_bytes)
        self.engine_version = queue.next_step  # as last reported
        self._asked = False  # whether groups were requested since the last release

    def see(self, engine_version: int) -> int:
        """Note the version that the engines have now; returns the version to issue groups with."""
        step = self._queue.next_step
        if not self.engine_version <= engine_version <= step + 1:
            raise CountsError(
                f"an engine has version {engine_version}, but version {self.engine_version} was "
                f"there before and step {step + 1} is the next one: versions never go backwards, "
                "nor ahead of the steps"
            )

        self.engine_version = engine_version
        self._asked = True
        return min(engine_version, step)

    def released(self) -> None:
        """Note that a step was consumed."""
        self.memory.keep(self._queue.holds)
        self._asked = False

    def rollout_capacity(self, engine_version: int) -> int:
        """Groups that may start besides those that run."""
        return self._open(self._queue.num_running - self._queue.num_waiting, engine_version)

    def waiting(self, engine_version: int, num_capacity: int) -> list[int]:
        """Ids of groups that wait for another attempt and may start now."""
        if not num_capacity or not self._queue.num_waiting:
            return []

        room = {
            queue: queue.room(self._last_step(engine_version)) + len(queue.waiting)
            for queue in self._queue.domain_queues.values()
        }
        started = list[int]()
        for number in self._queue.waiting[: None if self._plan.domains else num_capacity]:
            queue = self._queue.queue_of(number)
            if room[queue] > 0 and len(started) < num_capacity:
                room[queue] -= 1
                started.append(number)

        return started

    def new(self, engine_version: int, num_capacity: int, num_left: int | None) -> list[int]:
        """Sources of the groups to issue now. If memory is full, only groups that the next step
        waits for."""
        domain_queues = list(self._queue.domain_queues.values())
        room = [queue.room(self._last_step(engine_version)) for queue in domain_queues]
        if self._budgets:
            due = engine_version + self._plan.max_staleness
            room = [
                min(own, budget.room(due)) for own, budget in zip(room, self._budgets, strict=True)
            ]

        room = [max(0, own) for own in room]
        bounds = [num_capacity, sum(room)]
        if (free := self.memory.left(self._queue.num_running)) is not None:
            bounds.append(
                max(free, sum(max(0, queue.room(self._queue.next_step)) for queue in domain_queues))
            )

        if num_left is not None:
            bounds.append(num_left)
        return self._by_slot([queue.num_live for queue in domain_queues], room, min(bounds))

    def sources_after_next(self) -> list[int]:
        """Sources of the slots of the step after the next one."""
        quotas = self._queue.quotas
        sources = range(len(self._plan.sources))
        before = [quotas.up_to(source, quotas.next_step) for source in sources]
        after = [quotas.up_to(source, quotas.next_step + 1) for source in sources]
        room = [end - start for start, end in zip(before, after, strict=True)]
        return self._by_slot(before, room, self._plan.consumer_batch)

    def issued(self, source: int, engine_version: int) -> None:
        """Count a group in its step's generation budget: a new one, or an aborted one that now runs
        for another step."""
        if self._budgets:
            self._budgets[source].issue(engine_version + self._plan.max_staleness)

    def is_stalled(self, num_left: int | None) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is
        offered."""
        engine_version = min(self.engine_version, self._queue.next_step)
        num_capacity = self._open(0, engine_version)
        if not self._asked or self._queue.num_running > self._queue.num_waiting:
            return False

        return not (
            self.waiting(engine_version, num_capacity)
            or self.new(engine_version, num_capacity, num_left)
        )

    def is_spent(self, weights_step: int) -> bool:
        """Whether the generation budget is used up before the next step is consumed, for the
        sources whose groups it lacks, and no later version is on its way."""
        if not self._budgets or not self._knows(weights_step):
            return False
        due = min(self.engine_version, self._queue.next_step) + self._plan.max_staleness
        queues = zip(self._budgets, self._queue.domain_queues.values(), strict=True)
        lacking = [budget for budget, queue in queues if queue.num_lacking > 0]
        return all(budget.room(due) <= 0 for budget in lacking or self._budgets)

    def is_stuck(self, weights_step: int) -> bool:
        """Whether nothing runs and nothing may start before the next step is consumed, for lack of
        newer weights."""
        if self._queue.num_running or self._queue.closed or not self._knows(weights_step):
            return False
        return self._open(0, self.engine_version) == 0

    def _knows(self, weights_step: int) -> bool:
        """Whether the version seen last is the last one before the next step is consumed."""
        return self._asked and self.engine_version >= weights_step

    def _last_step(self, engine_version: int) -> int:
        """The last step that may use groups that start now."""
        return min(engine_version + self._plan.max_staleness, self._plan.total_steps - 1)

    def _open(self, running: int, engine_version: int) -> int:
        """The rollout capacity, excluding steps that the run does not have."""
        plan = self._plan
        queue = self._queue
        version = self._last_step(engine_version) - plan.max_staleness
        num_open = sum(each.num_extra - each.num_unfilled for each in queue.domain_queues.values())
        accepted = queue.next_step * plan.consumer_batch + queue.num_complete - num_open

        return rollout_capacity(
            self._max_concurrent,
            running,
            plan.max_staleness,
            version,
            plan.consumer_batch,
            accepted,
        )

    def _by_slot(self, filled: list[int], room: list[int], count: int) -> list[int]:
        """The sources of the first `count` slots without a group. filled, room: by source, slots
        with a group, and slots that may still get one."""
        if len(filled) == 1:
            return [0] * count

        last = [full + more for full, more in zip(filled, room, strict=True)]
        chosen = list[int]()
        while len(chosen) < count:
            open_ones = (source for source, full in enumerate(filled) if full < last[source])
            chosen.append(
                min(open_ones, key=lambda source: self._queue.quotas.place(source, filled[source]))
            )
            filled[chosen[-1]] += 1

        return chosen
