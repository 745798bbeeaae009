"""Decides which steps are checked, within a budget of time and ahead of time, so that weights of
older versions are kept for them."""

import hashlib
import random
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

SHARE = 0.015
"""The share of the run's time that checked steps may take. With the checks of every step it is at
most 2 %."""

SHORT_S = 60.0
"""Shorter runs may take as much time for checks as one of this length: in a run of seconds they
cost nobody anything."""

NUM_FIRST = 8
"""So many first steps of a process are checked."""


class CheckSchedule:
    """Checks the first steps of a process, then those after 2^n steps, the first that may hold
    tokens of every staleness, and the last, whatever they cost. Of the others one in every
    `frequency` steps is checked, at a random place, so that a fault in every third step is found,
    unless checked steps have used up their share of the run's time. With a frequency of 1 every
    step is checked, with 0 none is."""

    def __init__(
        self,
        frequency: int,
        first_step: int,
        max_staleness: int = 0,
        others: Collection[int] = (),
        last_step: int | None = None,
    ) -> None:
        """first_step: of this process. others: further steps to check whatever it costs.
        last_step: of the run."""
        self.frequency = frequency
        self._first_step = first_step
        self._max_staleness = max_staleness
        self._named = {first_step + max_staleness + 1, last_step, *others}
        self._began = time.monotonic()
        self._spent_s = 0.0

    def is_due(self, step: int) -> bool:
        """Whether to check the step."""
        if self.frequency == 0:
            return False
        if self.frequency == 1 or self._is_named(step):
            return True
        return self._is_place(step) and self._has_time()

    def expects(self, step: int) -> bool:
        """Whether a later step that may be checked may train on tokens from the weights of
        `step`."""
        return any(self.is_due(step + later + 1) for later in range(self._max_staleness))

    def budget_s(self, step: int) -> float:
        """Time for calling reward functions again in a checked step: a part of the budget between
        two of them."""
        step_s = (time.monotonic() - self._began) / (step - self._first_step + 1)
        return max(SHARE / 4 * self.frequency * step_s, 0.05)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside as that of checks."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent_s += time.monotonic() - began

    def _has_time(self) -> bool:
        run_s = max(time.monotonic() - self._began, SHORT_S)
        return self._spent_s <= SHARE * run_s

    def _is_named(self, step: int) -> bool:
        since = step - self._first_step
        is_power = since & (since - 1) == 0
        return since < NUM_FIRST or is_power or step in self._named

    def _is_place(self, step: int) -> bool:
        """Whether the step is the one to check in its window."""
        window = step // self.frequency
        digest = hashlib.blake2b(f"check {window}".encode(), digest_size=4).digest()
        place = int.from_bytes(digest, "little")
        return step % self.frequency == place % self.frequency


def drawn_update(role: str, step: int, num_updates: int) -> int:
    """Which of the step's optimizer steps of a model is compared with plain passes, beside the
    first; the same on all ranks."""
    return random.Random(f"{role} {step}").randrange(max(num_updates, 1))
