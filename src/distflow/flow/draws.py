"""Draws: how many tickets may be issued for each step (`max_num_gen_batches`), where a filter drops most of them."""


class Draws:
    """Counts the tickets of a class, which are those with the same due step.

    A class covers the steps behind the last class up to its own due step, the first one all from `next_step` on, and
    may have `per_step` tickets for each of them. At staleness 0 each step is a class of its own.
    """

    def __init__(self, per_step: int, next_step: int) -> None:
        self._per_step = per_step
        self._due = next_step - 1
        self._left = 0

    def room(self, due: int) -> int:
        """Tickets with this due step that may still be issued."""
        return self._per_step * (due - self._due) if due > self._due else self._left

    def issue(self, due: int) -> None:
        """A ticket is issued: the first one of a class begins it."""
        self._left = self.room(due) - 1
        self._due = max(self._due, due)
