"""Credits: how many prompt groups may start now. Staleness is bounded here, by admission, not by dropping later.

Draws: how many groups may be issued for each step (`max_num_gen_batches`), where a filter drops most of them.

How many more groups there is room for, where the groups that wait for their step take memory that others need.

Admission: which groups may start now, by credits, by places in the steps, by draws and by memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.groups import CountsError
from distflow.scheduling.sample_queue import SampleQueue


def capacity(
    max_concurrent: int, running: int, max_staleness: int, version: int, consumer_batch: int, accepted: int
) -> int:
    """Groups that may still start (AReaL, arXiv 2505.24298, its rule for bounded staleness). It may be negative.

    version: the lowest step that an engine which may take the group serves, not the trainer's.
    accepted: `consumer_batch` for each consumed step, short or not, plus the complete groups not yet consumed.
    """
    consumer_batch = max(1, consumer_batch)
    admitted = (max_staleness + version + 1) * consumer_batch - (accepted + running)
    return min(max(1, max_concurrent) - running, admitted)


@dataclass(frozen=True)
class RolloutCapacity:
    """The admission rule of a run.

    max_concurrent: groups that may run at once. consumer_batch: groups of a step.
    max_staleness: steps by which weights that made a token may be older than the step that trains on it.
    """

    max_concurrent: int
    max_staleness: int
    consumer_batch: int

    def open(self, running: int, version: int, accepted: int) -> int:
        """Credits to give out now, with the lost groups that wait to be issued again not counted in `running`.

        At staleness 0 they open in waves: none while a group of the last wave runs. What shares a batch in the
        engine is then decided by the ledger alone, never by who finished first, and a resumed run repeats it.
        """
        if self.max_staleness == 0 and running:
            return 0
        return max(
            0, capacity(self.max_concurrent, running, self.max_staleness, version, self.consumer_batch, accepted)
        )


class GenerationBudget:
    """Counts the groups of a class, which are those with the same due step.

    A class covers the steps behind the last class up to its own due step, the first one all from `next_step` on, and
    may have `per_place` groups for each place of those. At staleness 0 each step is a class of its own.
    """

    def __init__(self, per_place: int, next_step: int, places: Callable[[int], int]) -> None:
        """places: those of all steps from `next_step` up to the given one."""
        self._per_place, self._places = per_place, places
        self._due = next_step - 1
        self._num_covered = self._left = 0

    def room(self, due: int) -> int:
        """Groups with this due step that may still be issued."""
        return self._per_place * (self._places(due) - self._num_covered) if due > self._due else self._left

    def issue(self, due: int) -> None:
        """A group is issued: the first one of a class begins it."""
        self._left = self.room(due) - 1  # below 0 where those that were aborted before are more than it may have
        self._due = max(self._due, due)
        self._num_covered = max(self._num_covered, self._places(due))


class MemoryLimit:
    """Counts the bytes of complete groups, and takes those that run to become as large as those before them were.

    limit_bytes: of all of them, None for no limit. Before any group is known, there is room for none: whoever asks
    admits what is waited for in any case.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[int, int] = {}
        self._num_weighed = self._num_bytes = 0  # of all groups so far

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def weigh(self, number: int, num_bytes: int) -> None:
        """The group of that group is complete."""
        self._held[number] = num_bytes
        self._num_weighed += 1
        self._num_bytes += num_bytes

    def keep(self, holds: Callable[[int], bool]) -> None:
        """Forget the groups that are not held any more."""
        self._held = {number: num_bytes for number, num_bytes in self._held.items() if holds(number)}

    def left(self, num_running: int) -> int | None:
        """Groups that may start beside those that run, None for any number."""
        if self._limit_bytes is None:
            return None
        if not self._num_bytes:
            return 0
        return max(0, (self._limit_bytes - self.held_bytes) * self._num_weighed // self._num_bytes - num_running)


class Admission:
    """Looks at the queue and starts nothing. Sources are numbered as in `plan.sources`.

    served: in all methods, the version to issue groups with. num_left: groups that there still may be, None for no
    bound. weights_step: the last version that was sent.
    """

    def __init__(self, plan: DataPlan, queue: SampleQueue) -> None:
        self._plan, self._edge = plan, queue
        all_at_once = ceil((plan.max_staleness + 1) * plan.consumer_batch * (1 + plan.oversampling)) + len(plan.sources)
        max_concurrent = plan.max_concurrent or all_at_once  # what is beyond the places is rounded up by source
        self._credits = RolloutCapacity(max_concurrent, plan.max_staleness, plan.consumer_batch)
        batches = plan.max_num_gen_batches
        sources = range(0 if batches is None else len(plan.sources))
        self._draws = [
            GenerationBudget(batches or 0, queue.next_step, partial(queue.quotas.in_all, number)) for number in sources
        ]
        self.room = MemoryLimit(plan.max_held_bytes)
        self.served = queue.next_step  # as it was last told
        self._asked = False  # for groups, since the last release

    def see(self, served_step: int) -> int:
        """Take note of the version that is served now; the one to issue groups with."""
        step = self._edge.next_step
        if not self.served <= served_step <= step + 1:
            raise CountsError(
                f"an engine serves version {served_step}, but version {self.served} was served already and step "
                f"{step} is the next one: versions never go backwards, nor ahead of the steps"
            )
        self.served, self._asked = served_step, True
        return min(served_step, step)

    def released(self) -> None:
        """A step was consumed."""
        self.room.keep(self._edge.holds)
        self._asked = False

    def credits(self, served: int) -> int:
        """Groups that may start beside those that run."""
        return self._open(self._edge.num_running - self._edge.num_waiting, served)

    def waiting(self, served: int, num_capacity: int) -> list[int]:
        """Groups of groups that wait for another attempt and may start now."""
        if not num_capacity or not self._edge.num_waiting:
            return []
        room = {lane: lane.room(self._last_step(served)) + len(lane.waiting) for lane in self._edge.lanes.values()}
        started = list[int]()
        for number in self._edge.waiting[: None if self._plan.domains else num_capacity]:
            lane = self._edge.lane_of(number)
            if room[lane] > 0 and len(started) < num_capacity:
                room[lane] -= 1
                started.append(number)
        return started

    def new(self, served: int, num_capacity: int, num_left: int | None) -> list[int]:
        """Groups to issue now, each by its source. Where memory is full these are the ones that the next step waits
        for, and no other."""
        lanes = list(self._edge.lanes.values())
        room = [lane.room(self._last_step(served)) for lane in lanes]
        if self._draws:
            due = served + self._plan.max_staleness
            room = [min(own, draws.room(due)) for own, draws in zip(room, self._draws, strict=True)]
        room = [max(0, own) for own in room]
        bounds = [num_capacity, sum(room)]
        if (free := self.room.left(self._edge.num_running)) is not None:
            bounds.append(max(free, sum(max(0, lane.room(self._edge.next_step)) for lane in lanes)))
        if num_left is not None:
            bounds.append(num_left)
        return self._by_place([lane.num_live for lane in lanes], room, min(bounds))

    def issued(self, source: int, served: int) -> None:
        """A group counts among those drawn for its step: a new one, or one that was aborted and is tried for another
        step than before."""
        if self._draws:
            self._draws[source].issue(served + self._plan.max_staleness)

    def is_stalled(self, num_left: int | None) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is offered."""
        served = min(self.served, self._edge.next_step)
        return self._asked and not self._edge.num_running and not self.new(served, self._open(0, served), num_left)

    def is_spent(self, weights_step: int) -> bool:
        """Whether no group can be drawn before the next step is consumed, of a source that it lacks groups of: all
        were that may be at the version served, and no later version is on its way."""
        if not self._draws or not self._knows(weights_step):
            return False
        due, lanes = min(self.served, self._edge.next_step) + self._plan.max_staleness, self._edge.lanes.values()
        lacking = [draws for draws, lane in zip(self._draws, lanes, strict=True) if lane.num_untaken < lane.num_wanted]
        return all(draws.room(due) <= 0 for draws in lacking or self._draws)

    def is_stuck(self, weights_step: int) -> bool:
        """Whether nothing runs and nothing may start before the next step is consumed, for want of newer weights."""
        if self._edge.num_running or self._edge.closed or not self._knows(weights_step):
            return False
        return self._open(0, self.served) == 0

    def _knows(self, weights_step: int) -> bool:
        """Whether the version seen last is the last one before the next step is consumed."""
        return self._asked and self.served >= weights_step

    def _last_step(self, served: int) -> int:
        """The last that groups which start now may be for."""
        return min(served + self._plan.max_staleness, self._plan.total_steps - 1)

    def _open(self, running: int, served: int) -> int:
        """Credits: none for steps that the run does not have."""
        version = self._last_step(served) - self._plan.max_staleness
        accepted = self._edge.next_step * self._plan.consumer_batch + self._edge.num_complete
        return self._credits.open(
            running, version, accepted - sum(lane.num_extra for lane in self._edge.lanes.values())
        )

    def _by_place(self, filled: list[int], room: list[int], count: int) -> list[int]:
        """The sources of the first `count` places without a group. filled, room: by source, places with one, and more
        that may have one."""
        if len(filled) == 1:
            return [0] * count
        last = [full + more for full, more in zip(filled, room, strict=True)]
        chosen = list[int]()
        while len(chosen) < count:
            open_ones = (source for source, full in enumerate(filled) if full < last[source])
            chosen.append(min(open_ones, key=lambda source: self._edge.quotas.place(source, filled[source])))
            filled[chosen[-1]] += 1
        return chosen
