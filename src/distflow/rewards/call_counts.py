"""Counts of scored samples and of reward errors, whatever happens to their groups afterwards."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

TRAINING, VALIDATION = "training", "validation"
counted_for: ContextVar[str] = ContextVar("counted_for", default=TRAINING)
"""What the running task scores samples for; tasks that it starts inherit it. Both may run at the same time."""


@contextmanager
def validating() -> Iterator[None]:
    """Inside, scores are counted for validation."""
    token = counted_for.set(VALIDATION)
    try:
        yield
    finally:
        counted_for.reset(token)


class RewardCallCounts(NamedTuple):
    """asked, failed: numbers of samples. first: the first reward error."""

    asked: int = 0
    failed: int = 0
    first: str = ""

    @property
    def share(self) -> float:
        """Share of the samples that failed."""
        return self.failed / self.asked if self.asked else 0.0


class RewardCounts(NamedTuple):
    """A worker's counts: of samples, and those of the reward functions that are metrics."""

    calls: RewardCallCounts = RewardCallCounts()
    counts: Mapping[str, float] = {}

    @staticmethod
    def joined(parts: Sequence["RewardCounts"]) -> "RewardCounts":
        """Sum over several workers."""
        counts = Counter[str]()
        for part in parts:
            counts.update(part.counts)
        return RewardCounts(joined([part.calls for part in parts]), dict(counts))


def joined(parts: Iterable[RewardCallCounts]) -> RewardCallCounts:
    """Sum over several scopes or workers."""
    known = list(parts)
    first = next((part.first for part in known if part.first), "")
    return RewardCallCounts(sum(part.asked for part in known), sum(part.failed for part in known), first)


class CallCounts:
    """Counts on the asyncio thread, training and validation apart; the trainer takes the counts."""

    def __init__(self) -> None:
        self._counted: dict[str, RewardCallCounts] = defaultdict(RewardCallCounts)
        self._lock = threading.Lock()

    def add(self, asked: int, failed: int, first: str = "") -> None:
        """first: the first reward error, if any."""
        with self._lock:
            scope = counted_for.get()
            self._counted[scope] = joined(
                [self._counted[scope], RewardCallCounts(asked, failed, first if failed else "")]
            )

    def take(self, scope: str = TRAINING) -> RewardCallCounts:
        """What was counted since the last call."""
        with self._lock:
            return self._counted.pop(scope, RewardCallCounts())
