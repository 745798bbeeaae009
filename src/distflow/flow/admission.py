"""Admission: which groups may start now, by credits, by places in the steps, by draws and by memory."""

from functools import partial
from math import ceil

from distflow.flow.account import AccountingError
from distflow.flow.credits import Credits
from distflow.flow.data_plan import DataPlan
from distflow.flow.draws import Draws
from distflow.flow.edge import ExperienceEdge
from distflow.flow.room import Room


class Admission:
    """Looks at the edge and starts nothing. Sources are numbered as in `plan.sources`.

    served: in all methods, the version to issue tickets with. num_left: tickets that there still may be, None for no
    bound. weights_step: the last version that was sent.
    """

    def __init__(self, plan: DataPlan, edge: ExperienceEdge) -> None:
        self._plan, self._edge = plan, edge
        all_at_once = ceil((plan.max_staleness + 1) * plan.consumer_batch * (1 + plan.oversampling)) + len(plan.sources)
        max_concurrent = plan.max_concurrent or all_at_once  # what is beyond the places is rounded up by source
        self._credits = Credits(max_concurrent, plan.max_staleness, plan.consumer_batch)
        batches = plan.max_num_gen_batches
        sources = range(0 if batches is None else len(plan.sources))
        self._draws = [Draws(batches or 0, edge.next_step, partial(edge.quotas.in_all, number)) for number in sources]
        self.room = Room(plan.max_held_bytes)
        self.served = edge.next_step  # as it was last told
        self._asked = False  # for tickets, since the last release

    def see(self, served_step: int) -> int:
        """Take note of the version that is served now; the one to issue tickets with."""
        step = self._edge.next_step
        if not self.served <= served_step <= step + 1:
            raise AccountingError(
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

    def waiting(self, served: int, num_credits: int) -> list[int]:
        """Tickets of groups that wait for another attempt and may start now."""
        if not num_credits or not self._edge.num_waiting:
            return []
        room = {lane: lane.room(self._last_step(served)) + len(lane.waiting) for lane in self._edge.lanes.values()}
        started = list[int]()
        for number in self._edge.waiting[: None if self._plan.domains else num_credits]:
            lane = self._edge.lane_of(number)
            if room[lane] > 0 and len(started) < num_credits:
                room[lane] -= 1
                started.append(number)
        return started

    def new(self, served: int, num_credits: int, num_left: int | None) -> list[int]:
        """Tickets to issue now, each by its source. Where memory is full these are the ones that the next step waits
        for, and no other."""
        lanes = list(self._edge.lanes.values())
        room = [lane.room(self._last_step(served)) for lane in lanes]
        if self._draws:
            due = served + self._plan.max_staleness
            room = [min(own, draws.room(due)) for own, draws in zip(room, self._draws, strict=True)]
        room = [max(0, own) for own in room]
        bounds = [num_credits, sum(room)]
        if (free := self.room.left(self._edge.num_running)) is not None:
            bounds.append(max(free, sum(max(0, lane.room(self._edge.next_step)) for lane in lanes)))
        if num_left is not None:
            bounds.append(num_left)
        return self._by_place([lane.num_live for lane in lanes], room, min(bounds))

    def issued(self, source: int, served: int) -> None:
        """A ticket counts among those drawn for its step: a new one, or one that was aborted and is tried for another
        step than before."""
        if self._draws:
            self._draws[source].issue(served + self._plan.max_staleness)

    def is_stalled(self, num_left: int | None) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is offered."""
        served = min(self.served, self._edge.next_step)
        return self._asked and not self._edge.num_running and not self.new(served, self._open(0, served), num_left)

    def is_spent(self, weights_step: int) -> bool:
        """Whether no ticket can be drawn before the next step is consumed, of a source that it lacks groups of: all
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
