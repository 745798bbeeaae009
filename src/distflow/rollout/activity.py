"""Log of an engine's activity: stretches of decoding, which become the run's spans."""

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

_MOST_KEPT: Final = 10_000  # if nobody reads the log


@dataclass(frozen=True)
class Activity:
    """A stretch in which one lane was decoded under one version, and its slots were never empty.

    t0, t1: `time.time()`. One that directly follows another (with a new version or lane) starts at its `t1`: the time
    of a weight sync counts to the one before. version: the step whose weights drew the `tokens`.
    """

    t0: float
    t1: float
    version: int
    lane: str
    tokens: int


class ActivityLog:
    """Written by the decoding thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[Activity] = deque(maxlen=_MOST_KEPT)
        self._open: Activity | None = None

    def decoded(self, t0: float, t1: float, version: int, lane: str, tokens: int) -> None:
        """A step drew these tokens; there was work before it since the last step, unless `stopped` was called."""
        with self._lock:
            last = self._open
            if last is not None and (last.version, last.lane) == (version, lane):
                self._open = replace(last, t1=t1, tokens=last.tokens + tokens)
                return
            if last is not None:
                self._end(replace(last, t1=t0))
                t0 = t0 if last.tokens else last.t0  # one that was just read ends where this begins
            self._open = Activity(t0, t1, version, lane, tokens)

    def stopped(self) -> None:
        """Nothing is decoded from the end of the last step on."""
        with self._lock:
            if self._open is not None:
                self._end(self._open)
            self._open = None

    def take(self) -> list[Activity]:
        """All since the last call; a stretch that continues is cut here."""
        with self._lock:
            if self._open is not None:
                self._end(self._open)
                self._open = replace(self._open, t0=self._open.t1, tokens=0)
            taken = list(self._ended)
            self._ended.clear()
            return taken

    def _end(self, activity: Activity) -> None:
        if activity.tokens > 0:  # else it was read already
            self._ended.append(activity)


def take_activity(engine: object) -> list[Activity]:
    """An engine's activity since the last call; empty for an engine without a log."""
    take = getattr(engine, "take_activity", None)
    return take() if take is not None else []
