"""How many more groups there is room for, where the groups that wait for their step take memory that others need."""

from collections.abc import Callable


class Room:
    """Counts the bytes of complete groups, and takes those that run to become as large as those before them were.

    limit_bytes: of all of them, None for no limit. Before any group is known, there is room for none: whoever asks
    admits what is waited for in any case.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[int, int] = {}
        self._num_weighed = self._num_bytes = 0  # of all groups so far

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def weigh(self, number: int, num_bytes: int) -> None:
        """The group of that ticket is complete."""
        self._held[number] = num_bytes
        self._num_weighed += 1
        self._num_bytes += num_bytes

    def keep(self, holds: Callable[[int], bool]) -> None:
        """Forget the groups that are not held any more."""
        self._held = {number: num_bytes for number, num_bytes in self._held.items() if holds(number)}

    def left(self, num_running: int) -> int | None:
        """Groups that may start beside those that run, None for any number."""
        if self._limit_bytes is None:
            return None
        if not self._num_bytes:
            return 0
        return max(0, (self._limit_bytes - self.held_bytes) * self._num_weighed // self._num_bytes - num_running)
