"""The sample queue: holds prompt groups from their group to the step that consumes them, and forms the steps."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

from distflow.errors import UserError
from distflow.scheduling.domain_queue import DomainQueue, Group
from distflow.scheduling.domain_quotas import Quotas
from distflow.scheduling.groups import CountsError, PromptGroup, domain_of

MAX_ATTEMPTS = 3
"""Attempts that a group has: lost in the last one too, it is not tried again."""


class Exhausted(UserError):
    """A step did not fill although all the groups that it may have were issued."""


class SampleQueue:
    """A pure state machine; who waits for it is told by whoever drives it.

    A group whose group was issued at version v is due at step v + `max_staleness`. Step s takes complete groups by due
    step, then by group, and forms only where what it leaves behind still fits: for every d ≥ s, of the groups due by d
    at most (d - s) · `consumer_batch`. Admission (`flow.credits`) keeps one batch more than that before the step, so
    that it forms once all that it would have to wait for have ended, and no group is left past its due step, whatever
    the order of completion. At staleness 0 a step so is all that was drawn for it and survived.

    Of several domains all of this holds for each by itself, with its places of the steps (`quotas`) in place of whole
    batches: a step takes as many groups of each as it has places for it, so the shares are exact whatever is quick.

    A group that waits to be issued again has no due step until then.

    Without domains a step may also be taken in parts, of any sizes: each takes by due step, then by group, and the
    last must leave behind what fits (`num_owed`).

    Where more groups run than the step has places (`oversampling`, at staleness 0 alone), it takes those that come
    first and find a place, and the others are aborted: they wait to be issued again, and go first then. Which come
    first is for whoever drives it to say.

    when_exhausted: where no more groups may be drawn and the step is not full, an error, or continue with what there
    is.
    """

    def __init__(
        self,
        consumer_batch: int,
        *,
        max_staleness: int = 0,
        next_step: int = 0,
        when_exhausted: Literal["error", "continue"] = "error",
        quotas: Quotas | None = None,
        domains: Sequence[str] = ("",),
        oversampling: Fraction = Fraction(0),  # noqa: B008  immutable
    ) -> None:
        """quotas: shared with whoever admits groups; the queue says when a step is consumed. domains: their names in
        the order that `quotas` has them, empty for the one of a run that has no others. oversampling: see
        `DataPlan`."""
        self.next_step = next_step
        self.quotas = quotas or Quotas(consumer_batch, next_step)
        self._consumer_batch = consumer_batch
        self._max_staleness = max_staleness
        self._when_exhausted = when_exhausted
        self._groups: dict[int, Group] = {}
        self.lanes: Mapping[str, DomainQueue] = {
            name: DomainQueue(self._groups, self.quotas, number, max_staleness, oversampling)
            for number, name in enumerate(domains)
        }
        self._closed = False

    @property
    def num_complete(self) -> int:
        return sum(lane.num_complete for lane in self.lanes.values())

    @property
    def num_running(self) -> int:
        """Those that wait to be issued again included."""
        return len(self._groups) - self.num_complete

    @property
    def num_waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self.lanes.values())

    @property
    def num_live(self) -> int:
        """Neither consumed nor dropped."""
        return len(self._groups)

    @property
    def num_taken(self) -> int:
        """By the next step, as far as it is formed."""
        return sum(len(lane.formed) for lane in self.lanes.values())

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self.num_complete - self.num_taken

    @property
    def untaken(self) -> list[int]:
        """Groups of complete groups that no step has taken yet, ascending."""
        formed = set(self._formed)
        return [
            group.prompt_group.group_id
            for group in self.live
            if group.complete and group.prompt_group.group_id not in formed
        ]

    @property
    def live(self) -> list[Group]:
        """All groups, in group order."""
        return [self._groups[number] for number in sorted(self._groups)]

    @property
    def waiting(self) -> list[int]:
        """Groups of groups that are to be issued again, ascending."""
        return sorted(number for lane in self.lanes.values() for number in lane.waiting)

    @property
    def closed(self) -> bool:
        return self._closed

    def holds(self, number: int) -> bool:
        """Whether the group is complete and no step has consumed it."""
        return number in self._groups and self._groups[number].complete

    def lane_of(self, number: int) -> DomainQueue:
        """That of a group in the queue."""
        return self._lane(self._groups[number])

    def issue(self, prompt_group: PromptGroup) -> None:
        """A group starts. Raises CountsError where its group is in the queue already."""
        if prompt_group.group_id in self._groups:
            raise CountsError(f"group {prompt_group.group_id} was issued twice: it is on the sample queue already")
        self._groups[prompt_group.group_id] = Group(prompt_group)
        self.lane_of(prompt_group.group_id).issue(self._groups[prompt_group.group_id])

    def restore(self, group: Group) -> None:
        """A group of a snapshot. One that was not complete died with its process, and waits to be issued again."""
        self._groups[group.prompt_group.group_id] = group
        self._lane(group).restore(group)

    def retry(self, number: int) -> bool:
        """A running group was lost: whether it now waits to be issued again, or has used up its attempts."""
        group = self._running_group(number, "be tried again")
        group.failures += 1
        if group.failures < MAX_ATTEMPTS:
            self._lane(group).wait(group)
        return group.failures < MAX_ATTEMPTS

    def lose(self, number: int) -> None:
        """What was made of a complete group is gone, by no fault of the group's: it waits to be issued again. Raises
        CountsError where it is not complete, or a step has taken it."""
        if not self.holds(number) or number in self._formed:
            raise CountsError(f"group {number} cannot be lost: it is not complete, or a step has taken it")
        self.lane_of(number).wait(self._groups[number])

    @property
    def is_full(self) -> bool:
        """Whether a complete group waits for every place of the next step."""
        return all(lane.num_lacking <= 0 for lane in self.lanes.values())

    def has_place(self, number: int) -> bool:
        """Whether the next step has a place for a group that runs, besides those kept for groups which were aborted too
        often."""
        lane = self._lane(self._running_group(number, "take a place"))
        return lane.num_lacking > (0 if number in lane.kept else len(lane.kept))

    def abort(self, number: int) -> Group:
        """A running group is not needed: it waits to be issued again."""
        group = self._running_group(number, "be aborted")
        group.num_aborts += 1
        self._lane(group).wait(group)
        return group

    def was_aborted(self, number: int) -> bool:
        """Whether the group waits, or runs again, after an abort."""
        return self._groups[number].num_aborts > 0

    def reissue(self, number: int, version: int) -> PromptGroup:
        """A group that waits starts again under the same number, its attempt raised."""
        group = self._groups[number]
        self._lane(group).reissue(group, version)
        return group.prompt_group

    def complete(self, number: int, num_tokens: int, version: int | None = None) -> Group:
        """A group has passed its rewards and filters. version: the lowest of any of its tokens, None for that of its
        group."""
        group = self._running_group(number, "complete")
        self._lane(group).complete(group, num_tokens, version)
        return group

    def drop(self, number: int, reason: str) -> Group:
        """A group leaves without being trained on; its group is spent."""
        group = self._running_group(number, "be dropped")
        self._lane(group).drop(group, reason)
        return self._groups.pop(number)

    def close(self, closed: bool = True) -> None:
        """No further group will come, so that the last step may be short; or there are some again."""
        self._closed = closed

    def ready(self, step: int, exhausted: bool = False) -> tuple[int, ...] | None:
        """The groups that form `step`, ascending, or None while it must wait. Once formed it stays the same.

        It holds fewer than `consumer_batch` at the end of the data, and where groups are exhausted and the run is to
        continue; never none. exhausted: no further group may be drawn before this step is consumed for a domain that
        lacks some. Raises Exhausted where the run is not to continue, or nothing is left to continue with, and
        CountsError where a group was made by weights that are too old for the step.
        """
        return tuple(sorted(self._formed)) or self.part(step, self._consumer_batch, exhausted)

    def part(self, step: int, wanted: int, exhausted: bool = False) -> tuple[int, ...] | None:
        """`wanted` more groups of a step that is taken in parts, ascending, or None while they must be waited for. Of
        several domains a step is one part.

        exhausted, and how many there are at the end: as in `ready`. Raises as it does.
        """
        if step != self.next_step:
            raise CountsError(f"step {step} was asked for, but the next one is {self.next_step}")
        if len(self.lanes) == 1:
            needs = [(lane, wanted) for lane in self.lanes.values()]
        else:
            assert wanted == self._consumer_batch and not self._formed, "each domain has its places of a whole step"
            needs = [(lane, lane.num_wanted) for lane in self.lanes.values()]
        parts = self._form(step, needs, exhausted)
        if parts is None:
            return None
        for (lane, _), numbers in zip(needs, parts, strict=True):
            lane.take(sorted(numbers))
        return tuple(sorted(number for numbers in parts for number in numbers))

    def untake(self) -> None:
        """What the next step has taken waits for it again."""
        for lane in self.lanes.values():
            lane.untake()

    def num_owed(self) -> int:
        """Groups that the next step must take besides those that it has, so that none of what it leaves behind gets
        too old."""
        return sum(lane.num_owed() for lane in self.lanes.values())

    def release(self, step: int) -> list[Group]:
        """The step is consumed: its groups leave the queue. Raises CountsError where it was not formed yet."""
        numbers = self.ready(step)
        if numbers is None:
            raise CountsError(f"step {step} was released before it was formed: {self.num_running} groups run")
        groups = [self._groups.pop(number) for number in sorted(numbers)]
        self.next_step += 1
        self.quotas.consume()
        for lane in self.lanes.values():
            lane.consume(step)
        return groups

    @property
    def _formed(self) -> tuple[int, ...]:
        return tuple(number for lane in self.lanes.values() for number in lane.formed)

    def _lane(self, group: Group) -> DomainQueue:
        return self.lanes[domain_of(group.prompt_group.stream)]

    def _form(self, step: int, needs: Sequence[tuple[DomainQueue, int]], exhausted: bool) -> list[list[int]] | None:
        """What each lane gives to the step."""
        if self._max_staleness == 0 and self.num_running > self.num_waiting:
            return None  # the wave is not over
        if all(lane.num_untaken >= wanted for lane, wanted in needs):
            return _all([lane.first(step, wanted) for lane, wanted in needs])
        lacking = [lane for lane, wanted in needs if lane.num_untaken < wanted]
        if self.num_running > self.num_waiting or any(lane.waiting for lane in lacking):
            return None
        if self.num_untaken and (self._closed or (exhausted and self._when_exhausted == "continue")):
            return _all([lane.first(step, min(wanted, lane.num_untaken)) for lane, wanted in needs])
        if exhausted and not self._closed:
            raise Exhausted(self._exhausted_message(step))
        return None

    def _exhausted_message(self, step: int) -> str:
        lacking = [(name, lane) for name, lane in self.lanes.items() if lane.num_untaken < lane.num_wanted]
        name, lane = (lacking or list(self.lanes.items()))[0]
        num_left, last, dropped = lane.num_complete, lane.last_due, lane.dropped()
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        remedy = "use prompts of fitting difficulty or raise algorithm.filter_groups.max_num_gen_batches"
        if num_left:
            remedy += ", or set algorithm.filter_groups.when_exhausted=continue to train on those left"
        whose = f" of the domain '{name}'" if name else ""
        return (
            f"step {step} needs {lane.num_wanted} prompt groups{whose}, but of the {num_left + dropped.total()} drawn "
            f"for it{f' and those up to step {last}' if last is not None and last > step else ''} {num_left or 'none'} "
            f"are left (dropped: {reasons}): {remedy}"
        )

    def _running_group(self, number: int, verb: str) -> Group:
        group = self._groups.get(number)
        if group is None:
            raise CountsError(f"group {number} cannot {verb}: it was never issued, or is consumed or dropped")
        if group.complete:
            raise CountsError(f"group {number} cannot {verb}: it is complete already")
        if number in self._lane(group).waiting:
            raise CountsError(f"group {number} cannot {verb}: it was lost, and waits to be issued again")
        return group


def _all(parts: Sequence[list[int] | None]) -> list[list[int]] | None:
    """None where one is."""
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def still_consumable(
    groups: Sequence[Group], max_staleness: int, up_to: Callable[[int], int]
) -> tuple[list[Group], list[Group]]:
    """Complete groups of one domain, of a run that goes on under another bound: those that the next steps can consume
    by their due step, earliest due first as many as fit, and the others, which are stale.

    up_to: the domain's places in the steps from the next one to the given one.
    """
    fit: list[Group] = []
    stale: list[Group] = []
    for group in sorted(groups, key=lambda group: (group.due(max_staleness), group.prompt_group.group_id)):
        (fit if len(fit) < up_to(group.due(max_staleness)) else stale).append(group)
    return fit, stale
