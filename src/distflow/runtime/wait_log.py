"""A log of waits in this process: who waits, for what, on whom and since when."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Wait:
    """who: the loop that waits. what: for what. on: for whom. since: `time.time()`."""

    who: str
    what: str
    on: str
    since: float

    def seconds(self) -> float:
        return time.time() - self.since

    def __str__(self) -> str:
        return f"{self.who} has waited {self.seconds():.0f} s for {self.what} (on: {self.on})"


class Waits:
    """Every wait of a loop goes through it: `with waits("training", "step 3", on="rollout"): ...`.

    on_end: called for each wait, with its end, on the thread that waited. It may be slow: it runs outside the lock, and
    does not delay others that begin to wait.
    """

    def __init__(self, on_end: Callable[[Wait, float], None] = lambda wait, ended: None) -> None:
        self._on_end = on_end
        self._now: set[Wait] = set()
        self._lock = threading.Lock()  # the trainer and the asyncio thread wait at the same time

    @contextmanager
    def __call__(self, who: str, what: str, on: str) -> Iterator[None]:
        wait = Wait(who, what, on, time.time())
        with self._lock:
            self._now.add(wait)
        try:
            yield
        finally:
            with self._lock:
                self._now.discard(wait)
            self._on_end(wait, time.time())

    def now(self) -> list[Wait]:
        """The current waits, the longest first."""
        with self._lock:
            return sorted(self._now, key=lambda wait: wait.since)
