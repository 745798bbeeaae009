"""Decides which steps are audited: ahead of time, so that weights of older versions are kept, and within a budget."""

import hashlib
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

MOST_SHARE = 0.02
"""The share of the run's time that audits may take."""

NUM_FIRST = 3
"""The first audits of a process, which ignore the time budget."""


class AuditSchedule:
    """Audits the first step of a process, the second (weights have moved once), the first that may hold tokens of every
    age, and one in every `frequency` steps, at a random position, so that a fault in every third step is found.

    After the first few, an audit waits until audits have taken less than their share of the run's time, unless every
    step is audited. If weights may be stale, it then waits until weights of all ages were kept for it.
    """

    def __init__(self, frequency: int, first_step: int, max_staleness: int = 0, others: Collection[int] = ()) -> None:
        """frequency: in steps; 0 never audits. first_step: of this process. others: further steps to audit."""
        self.frequency, self._max_staleness = frequency, max_staleness
        self._always = {first_step, first_step + 1, first_step + max_staleness + 1, *others}
        self._waiting, self._planned = False, -1
        self._num_made, self._spent_s = 0, 0.0
        self._began = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Call once a step, in order."""
        if self.frequency <= 0:
            return False
        if self._is_named(step) or step == self._planned:
            return True
        if not self._is_place(step) and not self._waiting:
            return False
        can_be_made = self.is_affordable() or self._num_made < NUM_FIRST
        if can_be_made and (self._is_place(step) or not self._max_staleness):
            return True
        if can_be_made and self._planned < step:
            self._planned = step + self._max_staleness + 1
        self._waiting = True
        return False

    def expects(self, step: int) -> bool:
        """Whether a later step that may train on tokens of the weights of `step` may be audited."""
        ahead = range(step + 1, step + self._max_staleness + 1)
        return self.frequency > 0 and any(self._is_named(s) or self._is_place(s) or s == self._planned for s in ahead)

    def begins(self) -> None:
        """Call when an audit starts."""
        self._waiting, self._planned = False, -1
        self._num_made += 1

    def is_affordable(self) -> bool:
        return self._spent_s <= MOST_SHARE * (time.monotonic() - self._began)

    def budget_s(self, num_steps: int) -> float:
        """Half of an audit's share of the time between two audits. num_steps: steps begun so far."""
        step_s = (time.monotonic() - self._began) / num_steps
        return max(MOST_SHARE / 2 * self.frequency * step_s, 0.05)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside as audit time."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent_s += time.monotonic() - began

    def _is_named(self, step: int) -> bool:
        return step in self._always or self.frequency == 1

    def _is_place(self, step: int) -> bool:
        """Whether the step is the audited one of its window."""
        window = step // self.frequency
        place = int.from_bytes(hashlib.blake2b(f"audit {window}".encode(), digest_size=4).digest(), "little")
        return step % self.frequency == place % self.frequency
