"""How many verdicts were asked for, and how many failed: counted where they happen, whatever becomes of the group."""

import threading
from typing import NamedTuple


class Verdicts(NamedTuple):
    """asked, failed: numbers of samples. first: whose verdict was the first that failed, and why."""

    asked: int = 0
    failed: int = 0
    first: str = ""

    @property
    def share(self) -> float:
        """Of those asked for, the part that failed."""
        return self.failed / self.asked if self.asked else 0.0


class Tally:
    """Counts on the asyncio thread; the learner takes the counts."""

    def __init__(self) -> None:
        self._counted = Verdicts()
        self._lock = threading.Lock()

    def add(self, asked: int, failed: int, first: str = "") -> None:
        """first: told where some failed."""
        with self._lock:
            known = self._counted
            self._counted = Verdicts(
                known.asked + asked, known.failed + failed, known.first or (failed and first) or ""
            )

    def take(self) -> Verdicts:
        """What was counted since the last call."""
        with self._lock:
            taken, self._counted = self._counted, Verdicts()
        return taken
