"""The experience edge: holds prompt groups from their ticket to the step that consumes them, and forms the steps."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
    version: the lowest that a token of it has, known once it is complete.
    """

    ticket: Ticket
    complete: bool = False
    num_tokens: int = 0
    failures: int = 0
    version: int | None = None

    def due(self, max_staleness: int) -> int:
        """The last step that may train on it. Weights older than the ticket's are a fault, and make it due earlier."""
        version = self.ticket.version
        return max_staleness + (version if self.version is None else min(version, self.version))


@dataclass
class _Due:
    """Groups with the same due step. num_live: running or complete, but not waiting. dropped: counts by reason."""

    num_live: int = 0
    complete: set[int] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)


class Exhausted(UserError):
    """A step did not fill although all the tickets that it may have were issued."""


class ExperienceEdge:
    """A pure state machine; who waits for it is told by whoever drives it.

    A group whose ticket was issued at version v is due at step v + `max_staleness`. Step s takes complete groups by due
    step, then by ticket, and forms only where what it leaves behind still fits: for every d ≥ s, of the groups due by d
    at most (d - s) · `consumer_batch`. Admission (`flow.credits`) keeps one batch more than that before the step, so
    that it forms once all that it would have to wait for have ended, and no group is left past its due step, whatever
    the order of completion. At staleness 0 a step so is all that was drawn for it and survived.

    A group that waits to be issued again has no due step until then.

    A step may also be taken in parts, of any sizes: each takes by due step, then by ticket, and the last must leave
    behind what fits (`num_owed`).

    when_exhausted: where no more tickets may be drawn and the step is not full, an error, or continue with what there
    is.
    """

    def __init__(
        self,
        consumer_batch: int,
        *,
        max_staleness: int = 0,
        next_step: int = 0,
        when_exhausted: Literal["error", "continue"] = "error",
    ) -> None:
        self.next_step = next_step
        self._consumer_batch = consumer_batch
        self._max_staleness = max_staleness
        self._when_exhausted = when_exhausted
        self._groups: dict[int, Group] = {}
        self._waiting: set[int] = set()
        self._due: dict[int, _Due] = {}
        self._num_complete = 0
        self._formed: tuple[int, ...] = ()
        self._closed = False

    @property
    def num_complete(self) -> int:
        return self._num_complete

    @property
    def num_running(self) -> int:
        """Those that wait to be issued again included."""
        return len(self._groups) - self._num_complete

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        """Neither consumed nor dropped."""
        return len(self._groups)

    @property
    def num_taken(self) -> int:
        """By the next step, as far as it is formed."""
        return len(self._formed)

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self._num_complete - len(self._formed)

    @property
    def untaken(self) -> list[int]:
        """Tickets of complete groups that no step has taken yet, ascending."""
        formed = set(self._formed)
        return [group.ticket.number for group in self.live if group.complete and group.ticket.number not in formed]

    @property
    def live(self) -> list[Group]:
        """All groups, in ticket order."""
        return [self._groups[number] for number in sorted(self._groups)]

    @property
    def waiting(self) -> list[int]:
        """Tickets of groups that are to be issued again, ascending."""
        return sorted(self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed

    def holds(self, number: int) -> bool:
        """Whether the group is complete and no step has consumed it."""
        return number in self._groups and self._groups[number].complete

    def issue(self, ticket: Ticket) -> None:
        """A group starts. Raises AccountingError where its ticket is on the edge already."""
        if ticket.number in self._groups:
            raise AccountingError(f"ticket {ticket.number} was issued twice: it is on the experience edge already")
        self._groups[ticket.number] = Group(ticket)
        self._enter(self._groups[ticket.number])

    def restore(self, group: Group) -> None:
        """A group of a snapshot. One that was not complete died with its process, and waits to be issued again."""
        number = group.ticket.number
        self._groups[number] = group
        if group.complete:
            self._num_complete += 1
            self._enter(group)
        else:
            self._waiting.add(number)

    def retry(self, number: int) -> bool:
        """A running group was lost: whether it now waits to be issued again, or has used up its attempts."""
        group = self._running_group(number, "be tried again")
        group.failures += 1
        if group.failures < MAX_ATTEMPTS:
            self._leave(group)
            self._waiting.add(number)
        return group.failures < MAX_ATTEMPTS

    def lose(self, number: int) -> None:
        """What was made of a complete group is gone, by no fault of the group's: it waits to be issued again. Raises
        AccountingError where it is not complete, or a step has taken it."""
        if not self.holds(number) or number in self._formed:
            raise AccountingError(f"ticket {number} cannot be lost: it is not complete, or a step has taken it")
        group = self._groups[number]
        self._leave(group)
        group.complete, group.num_tokens, group.version = False, 0, None
        self._num_complete -= 1
        self._waiting.add(number)

    def reissue(self, number: int, version: int) -> Ticket:
        """A group that waits starts again under the same number, its attempt raised."""
        self._waiting.remove(number)
        group = self._groups[number]
        group.ticket = replace(group.ticket, version=version, attempt=group.ticket.attempt + 1)
        self._enter(group)
        return group.ticket

    def complete(self, number: int, num_tokens: int, version: int | None = None) -> Group:
        """A group has passed its rewards and filters. version: the lowest of any of its tokens, None for that of its
        ticket."""
        group = self._running_group(number, "complete")
        self._leave(group)
        group.complete, group.num_tokens = True, num_tokens
        group.version = group.ticket.version if version is None else version
        self._num_complete += 1
        self._enter(group)
        return group

    def drop(self, number: int, reason: str) -> None:
        """A group leaves without being trained on; its ticket is spent."""
        self._leave(self._running_group(number, "be dropped")).dropped[reason] += 1
        del self._groups[number]

    def close(self, closed: bool = True) -> None:
        """No further ticket will come, so that the last step may be short; or there are some again."""
        self._closed = closed

    def ready(self, step: int, exhausted: bool = False) -> tuple[int, ...] | None:
        """The tickets that form `step`, ascending, or None while it must wait. Once formed it stays the same.

        It holds fewer than `consumer_batch` at the end of the data, and where tickets are exhausted and the run is to
        continue; never none. exhausted: no further ticket may be drawn before this step is consumed. Raises Exhausted
        where the run is not to continue, or nothing is left to continue with, and AccountingError where a group was
        made by weights that are too old for the step.
        """
        return self._formed or self.part(step, self._consumer_batch, exhausted)

    def part(self, step: int, wanted: int, exhausted: bool = False) -> tuple[int, ...] | None:
        """`wanted` more tickets of a step that is taken in parts, ascending, or None while they must be waited for.

        exhausted, and how many there are at the end: as in `ready`. Raises as it does.
        """
        if step != self.next_step:
            raise AccountingError(f"step {step} was asked for, but the next one is {self.next_step}")
        numbers = self._form(step, wanted, exhausted)
        for number in numbers or ():
            self._leave(self._groups[number])
        self._formed += numbers or ()
        return numbers

    def untake(self) -> None:
        """What the next step has taken waits for it again."""
        for number in self._formed:
            self._enter(self._groups[number])
        self._formed = ()

    def num_owed(self) -> int:
        """Groups that the next step must take besides those that it has, so that none of what it leaves behind gets
        too old."""
        owed = num_left = 0
        for due in sorted(self._due):
            num_left += self._due[due].num_live
            owed = max(owed, num_left - max(0, due - self.next_step) * self._consumer_batch)
        return owed

    def release(self, step: int) -> list[Group]:
        """The step is consumed: its groups leave the edge. Raises AccountingError where it was not formed yet."""
        numbers = self.ready(step)
        if numbers is None:
            raise AccountingError(f"step {step} was released before it was formed: {self.num_running} groups run")
        groups = [self._groups.pop(number) for number in sorted(numbers)]
        self._num_complete -= len(numbers)
        self.next_step += 1
        self._formed = ()
        self._due = {due: members for due, members in self._due.items() if due > step or members.num_live}
        return groups

    def _form(self, step: int, wanted: int, exhausted: bool) -> tuple[int, ...] | None:
        if self._max_staleness == 0 and self.num_running > self.num_waiting:
            return None  # the wave is not over
        if self.num_untaken >= wanted:
            return self._due_first(step, wanted)
        if self.num_running:
            return None
        if self.num_untaken and (self._closed or (exhausted and self._when_exhausted == "continue")):
            return self._checked(step, set(self._groups) - set(self._formed))
        if exhausted and not self._closed:
            raise Exhausted(self._exhausted_message(step))
        return None

    def _due_first(self, step: int, wanted: int) -> tuple[int, ...] | None:
        """The first complete groups, unless they leave too many behind that are due by some step: more than the steps
        up to there take, and further parts of this one."""
        num_later = max(0, self._consumer_batch - len(self._formed) - wanted)
        chosen: list[int] = []
        num_left = num_running = 0
        for due in sorted(self._due):
            members = self._due[due]
            if due < step:
                self._checked(step, members.complete)
            taken = min(len(members.complete), wanted - len(chosen))
            num_left += members.num_live - taken
            num_running += members.num_live - len(members.complete)
            if num_left > max(0, due - step) * self._consumer_batch + num_later:
                if num_running:
                    return None
                raise AccountingError(
                    f"step {step} would leave {num_left} groups that are due by step {due}, more than the steps up to "
                    f"there take; of those that it would consume the first is ticket {min(chosen or members.complete)}"
                )
            chosen += sorted(members.complete)[:taken]
        return self._checked(step, chosen)

    def _checked(self, step: int, numbers: Iterable[int]) -> tuple[int, ...]:
        """In ticket order, once none of them would break the bound on staleness."""
        for number in numbers:
            version = self._groups[number].version
            assert version is not None, "it is complete"
            if not 0 <= step - version <= self._max_staleness:
                raise AccountingError(
                    f"ticket {number} holds tokens of version {version}, which step {step} may not train on: "
                    f"max_staleness is {self._max_staleness}"
                )
        return tuple(sorted(numbers))

    def _exhausted_message(self, step: int) -> str:
        num_left, last = self._num_complete, max(self._due, default=step)
        dropped = sum((members.dropped for members in self._due.values()), Counter[str]())
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        remedy = "use prompts of fitting difficulty or raise algorithm.filter_groups.max_num_gen_batches"
        if num_left:
            remedy += ", or set algorithm.filter_groups.when_exhausted=continue to train on those left"
        return (
            f"step {step} needs {self._consumer_batch} prompt groups, but of the {num_left + dropped.total()} drawn "
            f"for it{f' and those up to step {last}' if last > step else ''} {num_left or 'none'} are left (dropped: "
            f"{reasons}): {remedy}"
        )

    def _enter(self, group: Group) -> None:
        members = self._due.setdefault(group.due(self._max_staleness), _Due())
        members.num_live += 1
        if group.complete:
            members.complete.add(group.ticket.number)

    def _leave(self, group: Group) -> _Due:
        members = self._due[group.due(self._max_staleness)]
        members.num_live -= 1
        members.complete.discard(group.ticket.number)
        return members

    def _running_group(self, number: int, verb: str) -> Group:
        group = self._groups.get(number)
        if group is None:
            raise AccountingError(f"ticket {number} cannot {verb}: it was never issued, or is consumed or dropped")
        if group.complete:
            raise AccountingError(f"ticket {number} cannot {verb}: it is complete already")
        if number in self._waiting:
            raise AccountingError(f"ticket {number} cannot {verb}: it was lost, and waits to be issued again")
        return group


def still_consumable(
    groups: Sequence[Group], step: int, max_staleness: int, consumer_batch: int
) -> tuple[list[Group], list[Group]]:
    """Complete groups, of a run that goes on under another bound: those that steps from `step` on can consume by their
    due step, earliest due first as many as fit, and the others, which are stale."""
    fit: list[Group] = []
    stale: list[Group] = []
    for group in sorted(groups, key=lambda group: (group.due(max_staleness), group.ticket.number)):
        num_slots = (group.due(max_staleness) - step + 1) * consumer_batch
        (fit if len(fit) < num_slots else stale).append(group)
    return fit, stale
