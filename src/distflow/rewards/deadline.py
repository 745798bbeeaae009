"""Until when the verdict that a verifier process is giving must be there, for verifiers that can stop in time."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_due: ContextVar[float] = ContextVar("due", default=math.inf)


@contextmanager
def due_within(seconds: float) -> Iterator[None]:
    """Inside, verdicts are due that soon."""
    token = _due.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _due.reset(token)


def left_s() -> float:
    """Seconds until the process is killed; inf outside of a pool."""
    return _due.get() - time.monotonic()
