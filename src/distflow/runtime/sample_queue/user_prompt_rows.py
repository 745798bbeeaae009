"""Rows that a user's own loop submits, beside those of the data set, with their workflows and acceptance functions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, overload

from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow

ShouldAccept = Callable[[Batch], object]


class OfGroup(NamedTuple):
    """A call's options for its groups. should_accept: None accepts every group. workflow: None for the run's."""

    should_accept: ShouldAccept | None = None
    workflow: object = None


class Submissions:
    """Submitted rows, added on one thread and looked up on another. of_data: the functions for rows of the data set."""

    def __init__(self) -> None:
        self.of_data = OfGroup()
        self._rows: dict[int, tuple[PromptRow, OfGroup]] = {}

    def add(self, number: int, row: PromptRow, of_group: "OfGroup") -> None:
        """Add a row. number: counted on from the length of the data set."""
        self._rows[number] = replace(row, index=number), of_group

    def row(self, number: int) -> PromptRow:
        return self._rows[number][0]

    def of_group(self, number: int) -> "OfGroup":
        """The options of a row's group, also for rows of the data set."""
        return self._rows[number][1] if number in self._rows else self.of_data


class WithSubmitted(Sequence[PromptRow]):
    """The rows of a data set, followed by submitted rows, which its length does not count."""

    def __init__(self, rows: Sequence[PromptRow], submissions: Submissions) -> None:
        self._rows, self._submissions = rows, submissions

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | Sequence[PromptRow]:
        if isinstance(index, slice):
            return self._rows[index]
        row = self._submissions.row(index) if index >= len(self._rows) else self._rows[index]
        workflow = self._submissions.of_group(index).workflow
        return row if workflow is None else replace(row, workflow=workflow)
