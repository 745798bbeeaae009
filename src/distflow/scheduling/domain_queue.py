"""A domain queue, a part of the sample queue: the groups of one domain, by the last step that may
train on them."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from distflow.scheduling.domain_quotas import Quotas
from distflow.scheduling.group_states import CountsError, GroupState, PromptGroup


@dataclass
class _Due:
    """Groups with the same due step, except waiting ones. dropped: counts by reason."""

    running: set[int] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_live(self) -> int:
        return len(self.running) + len(self.complete)


class DomainQueue:
    """The groups of one domain in the queue. A pure state machine; `SampleQueue` checks that moves
    are possible.

    domain: its number in `quotas`. num_live: running, complete or waiting to be issued again.
    formed: groups that the next step has taken. num_unfilled: slots of that step that stay empty,
    once it is formed.
    """

    def __init__(
        self,
        groups: dict[int, PromptGroup],
        quotas: Quotas,
        domain: int,
        max_staleness: int,
        oversampling: Fraction = Fraction(0),  # noqa: B008  immutable
    ) -> None:
        """groups: of all domain queues, by id; each replaces its own records. oversampling: see
        `DataPlan`."""
        self._groups = groups
        self._quotas = quotas
        self.domain = domain
        self._max_staleness = max_staleness
        self._oversampling = oversampling
        self._due: dict[int, _Due] = {}
        self.num_live = self.num_complete = self.num_unfilled = 0
        self.waiting = set[int]()
        self.formed: tuple[int, ...] = ()

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self.num_complete - len(self.formed)

    @property
    def num_wanted(self) -> int:
        """Slots of the next step for which it has not taken a group."""
        return self._quotas.up_to(self.domain, self._quotas.next_step) - len(self.formed)

    @property
    def num_lacking(self) -> int:
        """Slots of the next step for which no group is complete."""
        return self.num_wanted - self.num_untaken

    @property
    def num_extra(self) -> int:
        """Extra groups that may run beyond the slots of the next step: a fraction of the missing
        ones, so that a few missing groups do not start a whole batch."""
        if self._oversampling:
            return ceil(self._oversampling * max(0, self.num_lacking))
        return 0

    def room(self, step: int) -> int:
        """Slots up to that step without a group in the queue, plus extra groups; negative if there
        are too many."""
        return (
            self._quotas.up_to(self.domain, step)
            + self.num_extra
            - self.num_unfilled
            - self.num_live
        )

    def add(self, number: int) -> None:
        """Add a group in any state."""
        group = self._groups[number]
        self.num_live += 1
        self.num_complete += group.complete

        if group.state is GroupState.WAITING:
            self.waiting.add(number)
        else:
            self._enter(number)

    def wait(self, number: int) -> None:
        """Let a running or complete group wait to be issued again."""
        self._leave(number)
        self.num_complete -= self._groups[number].complete
        self._change(number, state=GroupState.WAITING, num_tokens=0, lowest_version=None)
        self.waiting.add(number)

    def reissue(self, number: int, version: int) -> None:
        self.waiting.remove(number)
        self._change(
            number,
            state=GroupState.GENERATING,
            version=version,
            attempt=self._groups[number].attempt + 1,
        )
        self._enter(number)

    def complete(self, number: int, num_tokens: int, version: int | None) -> None:
        self._leave(number)
        lowest = version
        if version is None:
            lowest = self._groups[number].version

        self._change(number, state=GroupState.QUEUED, num_tokens=num_tokens, lowest_version=lowest)
        self.num_complete += 1
        self._enter(number)

    def drop(self, number: int, reason: str) -> None:
        self._leave(number).dropped[reason] += 1
        self._change(number, state=GroupState.DROPPED)
        self.num_live -= 1

    def take(self, numbers: Sequence[int]) -> None:
        """Take groups for the next step."""
        for number in numbers:
            self._leave(number)
            self._change(number, state=GroupState.TRAINING)
        self.formed += tuple(numbers)

    def untake(self, numbers: Collection[int]) -> None:
        for number in set(self.formed).intersection(numbers):
            self._change(number, state=GroupState.QUEUED)
            self._enter(number)
        self.formed = tuple(number for number in self.formed if number not in numbers)
        self.num_unfilled = 0

    def consume(self, step: int) -> None:
        """Forget the groups of a consumed step."""
        self.num_live -= len(self.formed)
        self.num_complete -= len(self.formed)
        self.formed = ()
        self.num_unfilled = 0
        self._due = {
            due: members for due, members in self._due.items() if due > step or members.num_live
        }

    def num_owed(self) -> int:
        """Groups that the next step must still take so that none of the rest becomes too stale."""
        owed = num_left = 0
        for due in sorted(self._due):
            num_left += self._due[due].num_live
            owed = max(owed, num_left - self._later(due))
        return owed

    def first(self, step: int, wanted: int) -> list[int] | None:
        """The first complete groups by due step, then by id; None if it must wait for running ones,
        because more groups due by some step would remain than the steps up to it and further parts
        of this one can take."""
        num_later = max(0, self.num_wanted - wanted)
        chosen: list[int] = []
        num_left = num_running = 0
        for due in sorted(self._due):
            members = self._due[due]
            taken = min(len(members.complete), wanted - len(chosen))
            num_left += members.num_live - taken
            num_running += len(members.running)

            if num_left > self._later(due) + num_later:
                if num_running:
                    return None

                raise CountsError(
                    f"step {step + 1} would leave {num_left} groups that are due by step "
                    f"{due + 1}, more than the steps up to that one use; the first group that it "
                    f"would consume is {min(chosen or members.complete)}"
                )

            chosen += sorted(members.complete)[:taken]

        return self._check(step, chosen)

    def dropped(self) -> Counter[str]:
        """Counts of dropped groups by reason, for due steps that are not consumed."""
        return sum((members.dropped for members in self._due.values()), Counter[str]())

    def _later(self, due: int) -> int:
        """Groups that the steps after the next one take, up to that step."""
        step = self._quotas.next_step
        return max(0, self._quotas.up_to(self.domain, due) - self._quotas.up_to(self.domain, step))

    def _check(self, step: int, numbers: Collection[int]) -> list[int]:
        """The numbers, checked against the bound on staleness."""
        for number in numbers:
            version = self._groups[number].lowest_version
            assert version is not None, "it is complete"

            if not 0 <= step - version <= self._max_staleness:
                raise CountsError(
                    f"group {number} holds tokens of version {version}, which step {step + 1} may "
                    f"not train on: max_staleness is {self._max_staleness}"
                )

        return list(numbers)

    def _change(self, number: int, **changes: Any) -> None:
        self._groups[number] = self._groups[number].changed(**changes)

    def _enter(self, number: int) -> None:
        group = self._groups[number]
        members = self._due.setdefault(group.due(self._max_staleness), _Due())
        (members.complete if group.complete else members.running).add(number)

    def _leave(self, number: int) -> _Due:
        members = self._due[self._groups[number].due(self._max_staleness)]
        members.running.discard(number)
        members.complete.discard(number)
        return members
