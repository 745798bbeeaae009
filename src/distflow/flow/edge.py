"""The experience edge: holds prompt groups from their ticket to the step that consumes them, and forms the steps."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distflow.config.errors import UserError
from distflow.flow.account import AccountingError
from distflow.flow.ticket import Ticket

MAX_ATTEMPTS = 3
"""Attempts that a group has: lost in the last one too, it is not tried again."""


@dataclass
class Group:
    """A prompt group on the edge: running until complete; one that was lost waits until it is issued again.

    num_tokens: of all its samples, prompts included. failures: times that it was lost while the run went on.
    """

    ticket: Ticket
    complete: bool = False
    num_tokens: int = 0
    failures: int = 0


Choose = Callable[[Sequence[Group], int, int], tuple[int, ...] | None]
"""(groups on the edge in ticket order, step, groups wanted) → the tickets that form the step, None to wait."""


def smallest_prefix(groups: Sequence[Group], step: int, wanted: int) -> tuple[int, ...] | None:
    """The rule at staleness 0, where every group is due: the smallest prefix of tickets with `wanted` survivors,
    in whatever order they completed. (Dropped groups have left the edge.)"""
    prefix = groups[:wanted]
    if len(prefix) < wanted or not all(group.complete for group in prefix):
        return None
    return tuple(group.ticket.number for group in prefix)


class Exhausted(UserError):
    """A step did not fill although all the tickets that it may have were issued."""


class ExperienceEdge:
    """A pure state machine; who waits for it is told by whoever drives it.

    max_tickets: tickets that may be issued for one step (`max_num_gen_batches` × `consumer_batch`), None for no bound.
    when_exhausted: where those are spent and the step is not full, an error, or continue with what there is.
    """

    def __init__(
        self,
        consumer_batch: int,
        *,
        next_step: int = 0,
        max_tickets: int | None = None,
        when_exhausted: Literal["error", "continue"] = "error",
        choose: Choose = smallest_prefix,
    ) -> None:
        self.next_step = next_step
        self._consumer_batch = consumer_batch
        self._max_tickets = max_tickets
        self._when_exhausted = when_exhausted
        self._choose = choose
        self._groups: dict[int, Group] = {}
        self._waiting: set[int] = set()
        self._num_complete = 0
        self._formed: tuple[int, ...] | None = None
        self._issued_for_step = 0
        self._dropped_for_step: Counter[str] = Counter()
        self._closed = False

    @property
    def num_complete(self) -> int:
        return self._num_complete

    @property
    def num_running(self) -> int:
        """Those that wait to be issued again included."""
        return len(self._groups) - self._num_complete

    @property
    def live(self) -> list[Group]:
        """Groups neither consumed nor dropped, in ticket order."""
        return [self._groups[number] for number in sorted(self._groups)]

    @property
    def waiting(self) -> list[Ticket]:
        """Of groups that are to be issued again, in ticket order."""
        return [self._groups[number].ticket for number in sorted(self._waiting)]

    @property
    def closed(self) -> bool:
        return self._closed

    def room(self, wanted: int) -> int:
        """How many of `wanted` further tickets the current step may still have."""
        return wanted if self._max_tickets is None else min(wanted, max(0, self._max_tickets - self._issued_for_step))

    def issue(self, ticket: Ticket) -> None:
        """A group starts. Raises AccountingError where its ticket is on the edge already."""
        if ticket.number in self._groups:
            raise AccountingError(f"ticket {ticket.number} was issued twice: it is on the experience edge already")
        self._groups[ticket.number] = Group(ticket)
        self._issued_for_step += 1

    def restore(self, group: Group) -> None:
        """A group of a snapshot. One that was not complete died with its process, and waits to be issued again."""
        number = group.ticket.number
        self._groups[number] = group
        if group.complete:
            self._num_complete += 1
        else:
            self._waiting.add(number)

    def retry(self, number: int) -> bool:
        """A running group was lost: whether it now waits to be issued again, or has used up its attempts."""
        group = self._running_group(number, "be tried again")
        group.failures += 1
        if group.failures < MAX_ATTEMPTS:
            self._waiting.add(number)
        return group.failures < MAX_ATTEMPTS

    def reissue(self, number: int, version: int) -> Ticket:
        """A group that waits starts again under the same number, its attempt raised."""
        self._waiting.remove(number)
        group = self._groups[number]
        group.ticket = replace(group.ticket, version=version, attempt=group.ticket.attempt + 1)
        return group.ticket

    def complete(self, number: int, num_tokens: int) -> None:
        """A group has passed its rewards and filters."""
        group = self._running_group(number, "complete")
        group.complete, group.num_tokens = True, num_tokens
        self._num_complete += 1

    def drop(self, number: int, reason: str) -> None:
        """A group leaves without being trained on; its ticket is spent."""
        self._running_group(number, "be dropped")
        del self._groups[number]
        self._dropped_for_step[reason] += 1

    def close(self) -> None:
        """No further ticket will come: the last step may be short."""
        self._closed = True

    def ready(self, step: int) -> tuple[int, ...] | None:
        """The tickets that form `step`, ascending, or None while it must wait. Once formed it stays the same.

        It holds fewer than `consumer_batch` at the end of the data, and where tickets are exhausted and the run is to
        continue; never none. Raises Exhausted where it is not to continue, or nothing is left to continue with.
        """
        if step != self.next_step:
            raise AccountingError(f"step {step} was asked for, but the next one is {self.next_step}")
        if self._formed is None:
            self._formed = self._form(step)
        return self._formed

    def release(self, step: int) -> list[Group]:
        """The step is consumed: its groups leave the edge. Raises AccountingError where it was not formed yet."""
        numbers = self.ready(step)
        if numbers is None:
            raise AccountingError(f"step {step} was released before it was formed: {self.num_running} groups run")
        groups = [self._groups.pop(number) for number in numbers]
        self._num_complete -= len(numbers)
        self.next_step += 1
        self._formed = None
        self._issued_for_step = 0
        self._dropped_for_step.clear()
        return groups

    def _form(self, step: int) -> tuple[int, ...] | None:
        if self.num_running and self._num_complete < self._consumer_batch:
            return None
        groups = self.live
        chosen = self._choose(groups, step, self._consumer_batch)
        if chosen is not None or self.num_running:
            return chosen
        survivors = tuple(group.ticket.number for group in groups)
        if self._closed:
            return survivors or None
        if self.room(1):
            return None
        if survivors and self._when_exhausted == "continue":
            return survivors
        raise Exhausted(self._exhausted_message(step, len(survivors)))

    def _exhausted_message(self, step: int, num_left: int) -> str:
        num_drawn = num_left + self._dropped_for_step.total()
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._dropped_for_step.most_common())
        remedy = "use prompts of fitting difficulty or raise algorithm.filter_groups.max_num_gen_batches"
        if num_left:
            remedy += ", or set algorithm.filter_groups.when_exhausted=continue to train on those left"
        return (
            f"step {step} needs {self._consumer_batch} prompt groups, but of the {num_drawn} drawn for it "
            f"{num_left or 'none'} are left (dropped: {reasons}): {remedy}"
        )

    def _running_group(self, number: int, verb: str) -> Group:
        group = self._groups.get(number)
        if group is None:
            raise AccountingError(f"ticket {number} cannot {verb}: it was never issued, or is consumed or dropped")
        if group.complete:
            raise AccountingError(f"ticket {number} cannot {verb}: it is complete already")
        if number in self._waiting:
            raise AccountingError(f"ticket {number} cannot {verb}: it was lost, and waits to be issued again")
        return group
