"""Rows that a user's own loop submits, beside those of the data set, and whether their groups are accepted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow

ShouldAccept = Callable[[Batch], object]


class Submissions:
    """What is added on one thread may be looked up on another. of_data: the function for rows of the data set."""

    def __init__(self) -> None:
        self.of_data: ShouldAccept | None = None
        self._rows: dict[int, tuple[PromptRow, ShouldAccept | None]] = {}

    def add(self, number: int, row: PromptRow, should_accept: ShouldAccept | None) -> None:
        """number: from the length of the data set on."""
        self._rows[number] = replace(row, index=number), should_accept

    def row(self, number: int) -> PromptRow:
        return self._rows[number][0]

    def should_accept(self, number: int) -> ShouldAccept | None:
        """Of the group of a row, also of the data set; None accepts every group."""
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
        if isinstance(index, int) and index >= len(self._rows):
            return self._submissions.row(index)
        return self._rows[index]
