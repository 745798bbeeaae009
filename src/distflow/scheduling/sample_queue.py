"""The sample queue: holds prompt groups from their issue to the step that consumes them, and forms
the steps."""

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Literal

from distflow.errors import UserError
from distflow.scheduling.domain_queue import DomainQueue
from distflow.scheduling.domain_quotas import Quotas
from distflow.scheduling.group_states import MAX_ABORTS, CountsError, GroupState, PromptGroup

MAX_ATTEMPTS = 3
"""The attempts that a group has; if it is lost in the last one too, it is dropped."""


class Exhausted(UserError):
    """A step did not fill although its generation budget is used up."""


class SampleQueue:
    """A pure state machine; its driver notifies waiting callers.

    A group that was issued at version v is due at step v + `max_staleness`. Step s takes complete
    groups by due step, then by group id, and forms only if the remaining ones still fit: for every
    d ≥ s, at most (d - s) · `consumer_batch` of the groups due by d. Admission (`rollout_capacity`)
    allows one batch more than that before the step, so it forms once all groups that it must wait
    for have ended, and no group is left past its due step, whatever the order of completion. At
    staleness 0 a step is all groups that were issued for it and not dropped.

    With several domains this holds for each separately, with its slots of the steps (`quotas`)
    instead of whole batches: a step takes as many groups of each domain as it has slots for it, so
    shares are exact whatever finishes first.

    A group that waits to be issued again has no due step.

    Without domains a step may also be taken in parts, of any sizes: each takes groups by due step,
    then by
    group id, and the remaining ones must fit after the last part (`num_owed`).

    With `oversampling`, at staleness 0, more groups run than the step has slots. The step takes
    those that finish first on their worker (`give_places`), and the others are aborted: they are
    issued again before new ones.

    closed: whether no further group will come, so that the last step may be short. when_exhausted:
    if no more groups may be issued and the step is not full, raise an error, or continue with a
    short step.
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
        """quotas: shared with admission; the queue reports when a step is consumed. domains: names
        in the order of `quotas`; one empty name for a run without domains. oversampling: see
        `DataPlan`."""
        self.next_step = next_step
        self.quotas = quotas or Quotas(consumer_batch, next_step)
        self._consumer_batch = consumer_batch
        self._max_staleness = max_staleness
        self._when_exhausted = when_exhausted
        self._groups: dict[int, PromptGroup] = {}
        self.domain_queues: Mapping[str, DomainQueue] = {
            name: DomainQueue(self._groups, self.quotas, number, max_staleness, oversampling)
            for number, name in enumerate(domains)
        }
        self.closed = False

    @property
    def num_complete(self) -> int:
        return sum(queue.num_complete for queue in self.domain_queues.values())

    @property
    def num_running(self) -> int:
        """Running groups, including those that wait to be issued again."""
        return len(self._groups) - self.num_complete

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.waiting) for queue in self.domain_queues.values())

    @property
    def num_live(self) -> int:
        """Groups that are neither consumed nor dropped."""
        return len(self._groups)

    @property
    def num_taken(self) -> int:
        """Groups that the next step has taken so far."""
        return len(self._formed)

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self.num_complete - self.num_taken

    @property
    def untaken(self) -> list[int]:
        """Ids of complete groups that no step has taken yet, ascending."""
        return [group.group_id for group in self.live if group.state is GroupState.QUEUED]

    @property
    def live(self) -> list[PromptGroup]:
        """All groups, by group id."""
        return [self._groups[number] for number in sorted(self._groups)]

    @property
    def waiting(self) -> list[int]:
        """Ids of groups that wait to be issued again, ascending."""
        return sorted(chain.from_iterable(queue.waiting for queue in self.domain_queues.values()))

    def holds(self, number: int) -> bool:
        """Whether the group is complete and no step has consumed it."""
        return number in self._groups and self._groups[number].complete

    def prompt_group(self, number: int) -> PromptGroup:
        return self._groups[number]

    def queue_of(self, number: int) -> DomainQueue:
        return self.domain_queues[self._groups[number].domain]

    def issue(self, prompt_group: PromptGroup) -> None:
        """Add a group that starts. Raises CountsError if it is already in the queue."""
        if prompt_group.group_id in self._groups:
            raise CountsError(
                f"group {prompt_group.group_id} was issued twice: it is on the sample queue already"
            )
        self.restore(prompt_group)

    def restore(self, group: PromptGroup) -> None:
        """Add a group of a snapshot. An incomplete one died with its process, and waits to be
        issued again."""
        self._groups[group.group_id] = group
        self.queue_of(group.group_id).add(group.group_id)

    def retry(self, number: int) -> bool:
        """A running group was lost. Returns whether it now waits to be issued again, or has used up
        its attempts."""
        failures = self.running_group(number, "be tried again").failures + 1
        self._groups[number] = self._groups[number].changed(failures=failures)
        if failures < MAX_ATTEMPTS:
            self.queue_of(number).wait(number)
        return failures < MAX_ATTEMPTS

    def lose(self, number: int) -> None:
        """Note that the samples of a complete group are lost, without its own failure: it waits to
        be issued again. Raises CountsError if it is not complete, or a step has taken it."""
        group = self._groups.get(number)
        if group is None or group.state is not GroupState.QUEUED:
            raise CountsError(
                f"group {number} cannot be lost: it is not complete, or a step has taken it"
            )
        self.queue_of(number).wait(number)

    def give_places(self, numbers: Sequence[int]) -> None:
        """Give places to a generation batch that begins: in each domain with more groups than the
        step lacks, only as many groups count, first those that were aborted too often. Each worker
        decides which groups it completes, as many as it has counting ones."""
        for name, queue in self.domain_queues.items():
            own = [number for number in sorted(numbers) if self._groups[number].domain == name]
            own.sort(key=lambda number: self._groups[number].num_aborts < MAX_ABORTS)
            for place, number in enumerate(own):
                self._groups[number] = self._groups[number].changed(
                    counts=place < queue.num_lacking
                )

    def abort(self, number: int) -> PromptGroup:
        """Abort a running group that is not needed: it waits to be issued again."""
        group = self.running_group(number, "be aborted")
        self._groups[number] = group.changed(num_aborts=group.num_aborts + 1)
        self.queue_of(number).wait(number)
        return self._groups[number]

    def reissue(self, number: int, version: int) -> PromptGroup:
        """Start a waiting group again, with the same id and the next attempt."""
        self.queue_of(number).reissue(number, version)
        return self._groups[number]

    def complete(self, number: int, num_tokens: int, version: int | None = None) -> PromptGroup:
        """Note that a group has its rewards and passed all filters. version: the lowest of its
        tokens, None for the group's."""
        self.running_group(number, "complete")
        self.queue_of(number).complete(number, num_tokens, version)
        return self._groups[number]

    def drop(self, number: int, reason: str) -> PromptGroup:
        """Drop a group without training on it; its id is used up."""
        self.running_group(number, "be dropped")
        self.queue_of(number).drop(number, reason)
        return self._groups.pop(number)

    def ready(self, step: int, exhausted: bool = False) -> tuple[int, ...] | None:
        """The groups that form `step`, ascending, or None while it must wait. Once formed it stays
        the same.

        It has fewer than `consumer_batch` at the end of the data, or if groups are exhausted and
        the run is to continue; never none. exhausted: no further group may be issued before this
        step is consumed for a domain that lacks some. Raises Exhausted if the run is not to
        continue, or no group is left, and CountsError if a group's weights are too old for the
        step.
        """
        if self._formed:
            return tuple(sorted(self._formed))

        numbers = self.part(step, self._consumer_batch, exhausted)
        if numbers is not None:
            for queue in self.domain_queues.values():
                queue.num_unfilled = queue.num_wanted

        return numbers

    def part(self, step: int, wanted: int, exhausted: bool = False) -> tuple[int, ...] | None:
        """`wanted` more groups of a step that is taken in parts, ascending, or None while they are
        missing. With several domains a step is one part.

        exhausted, and the size at the end of the data: as in `ready`. Raises what `ready` raises.
        """
        if step != self.next_step:
            raise CountsError(
                f"step {step + 1} was asked for, but the next one is {self.next_step + 1}"
            )

        needs = self._needs(wanted)
        parts = self._form(step, needs, exhausted)
        if parts is None:
            return None

        for (queue, _), numbers in zip(needs, parts, strict=True):
            queue.take(sorted(numbers))
        return tuple(sorted(chain.from_iterable(parts)))

    def untake(self, numbers: Collection[int] | None = None) -> None:
        """Put back these groups that the next step has taken, or all of them."""
        for queue in self.domain_queues.values():
            queue.untake(queue.formed if numbers is None else numbers)

    def num_owed(self) -> int:
        """Groups that the next step must still take so that none of the rest becomes too stale."""
        return sum(queue.num_owed() for queue in self.domain_queues.values())

    def release(self, step: int) -> list[PromptGroup]:
        """Consume the step: its groups leave the queue. Raises CountsError if it was not formed
        yet."""
        numbers = self.ready(step)
        if numbers is None:
            raise CountsError(
                f"step {step + 1} was released before it was formed: {self.num_running} groups run"
            )

        groups = [
            self._groups.pop(number).changed(state=GroupState.TRAINED) for number in sorted(numbers)
        ]
        self.next_step += 1
        self.quotas.consume()
        for queue in self.domain_queues.values():
            queue.consume(step)
        return groups

    @property
    def _formed(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(queue.formed for queue in self.domain_queues.values()))

    def _needs(self, wanted: int) -> list[tuple[DomainQueue, int]]:
        """How many groups each domain queue gives."""
        if len(self.domain_queues) == 1:
            return [(queue, wanted) for queue in self.domain_queues.values()]
        assert wanted == self._consumer_batch and not self._formed, (
            "each domain has its slots of a whole step"
        )
        return [(queue, queue.num_wanted) for queue in self.domain_queues.values()]

    def _form(
        self, step: int, needs: Sequence[tuple[DomainQueue, int]], exhausted: bool
    ) -> list[list[int]] | None:
        """The ids that each domain queue gives to the step."""
        if self._max_staleness == 0 and self.num_running > self.num_waiting:
            return None  # the wave has not ended

        if lacking := [queue for queue, wanted in needs if queue.num_untaken < wanted]:
            if self.num_running > self.num_waiting or any(queue.waiting for queue in lacking):
                return None

            may_be_short = self.closed or (exhausted and self._when_exhausted == "continue")
            if not (self.num_untaken and may_be_short):
                if exhausted and not self.closed:
                    raise Exhausted(self._exhausted_message(step))
                return None

        parts = [queue.first(step, min(wanted, queue.num_untaken)) for queue, wanted in needs]
        found = [part for part in parts if part is not None]
        return found if len(found) == len(parts) else None

    def _exhausted_message(self, step: int) -> str:
        lacking = [
            (name, queue) for name, queue in self.domain_queues.items() if queue.num_lacking > 0
        ]
        name, queue = (lacking or list(self.domain_queues.items()))[0]
        num_left = queue.num_complete
        dropped = queue.dropped()
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        whose = f" of the domain '{name}'" if name else ""

        return (
            f"step {step + 1} needs {queue.num_wanted} prompt groups{whose}, but of the "
            f"{num_left + dropped.total()} drawn for it {num_left or 'none'} are left (dropped: "
            f"{reasons}): use prompts of suitable difficulty (or reject fewer), raise "
            "algorithm.filter_groups.max_num_gen_batches, or set "
            "algorithm.filter_groups.when_exhausted=continue to train on those left"
        )

    def running_group(self, number: int, verb: str) -> PromptGroup:
        """A generating group. Raises CountsError, saying that it cannot `verb`, if it is in another
        state."""
        group = self._groups.get(number)
        if group is None:
            raise CountsError(
                f"group {number} cannot {verb}: it was never issued, or is consumed or dropped"
            )
        if group.complete:
            raise CountsError(f"group {number} cannot {verb}: it is complete already")
        if group.state is GroupState.WAITING:
            raise CountsError(
                f"group {number} cannot {verb}: it was lost, and waits to be issued again"
            )

        return group
