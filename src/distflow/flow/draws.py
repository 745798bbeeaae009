"""Draws: how many tickets may be issued for each step (`max_num_gen_batches`), where a filter drops most of them."""

from collections.abc import Callable


class Draws:
    """Counts the tickets of a class, which are those with the same due step.

    A class covers the steps behind the last class up to its own due step, the first one all from `next_step` on, and
    may have `per_place` tickets for each place of those. At staleness 0 each step is a class of its own.
    """

    def __init__(self, per_place: int, next_step: int, places: Callable[[int], int]) -> None:
        """places: those of all steps from `next_step` up to the given one."""
        self._per_place, self._places = per_place, places
        self._due = next_step - 1
        self._num_covered = self._left = 0

    def room(self, due: int) -> int:
        """Tickets with this due step that may still be issued."""
        return self._per_place * (self._places(due) - self._num_covered) if due > self._due else self._left

    def issue(self, due: int) -> None:
        """A ticket is issued: the first one of a class begins it."""
        self._left = self.room(due) - 1  # below 0 where those that were aborted before are more than it may have
        self._due = max(self._due, due)
        self._num_covered = max(self._num_covered, self._places(due))
