"""Rows that a user's own loop submits to the sample queue, and how they stand."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.errors import UserError
from distflow.scheduling.group_states import GroupCounts

ShouldAccept = Callable[[Batch], object]


class NothingToWaitFor(UserError):
    """Waiting would never end: no group runs, and none will start until the caller acts."""


@dataclass(frozen=True)
class Standing:
    """The state of the prompt groups."""

    group_counts: GroupCounts
    num_waiting: int
    """Running ones that are to be issued again."""
    num_offered: int
    """Rows that wait for capacity."""
    num_owed: int
    """Groups that must be taken before the step may be released."""


class OfGroup(NamedTuple):
    """A call's options for its groups."""

    should_accept: ShouldAccept | None = None
    """None accepts every group."""
    workflow: object = None
    """None for the run's."""


class Submissions:
    """Submitted rows, added on one thread and looked up on another. of_data: the functions for rows
    of the data set."""

    def __init__(self) -> None:
        self.of_data = OfGroup()
        self._rows: dict[int, tuple[PromptRow, OfGroup]] = {}

    def add(self, number: int, row: PromptRow, of_group: OfGroup) -> None:
        """Add a row. number: counted on from the length of the data set."""
        self._rows[number] = replace(row, index=number), of_group

    def row(self, number: int) -> PromptRow:
        return self._rows[number][0]

    def keep(self, numbers: Collection[int]) -> None:
        """Forget all other rows, whose groups are trained or dropped and never start again."""
        self._rows = {number: row for number, row in self._rows.items() if number in numbers}

    def of_group(self, number: int) -> OfGroup:
        """The options of a row's group, also for rows of the data set."""
        found = self._rows.get(number)
        return self.of_data if found is None else found[1]


class WithSubmitted(Sequence[PromptRow]):
    """The rows of a data set, followed by submitted rows, which its length does not count."""

    def __init__(self, rows: Sequence[PromptRow], submissions: Submissions) -> None:
        self._rows = rows
        self._submissions = submissions

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | Sequence[PromptRow]:
        if isinstance(index, slice):
            return self._rows[index]

        if index >= len(self._rows):
            row = self._submissions.row(index)
        else:
            row = self._rows[index]

        workflow = self._submissions.of_group(index).workflow
        if workflow is None:
            return row
        return replace(row, workflow=workflow)
