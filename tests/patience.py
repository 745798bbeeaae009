"""Deadlines for tests in which something healthy must end before a hang is cut."""

import time
from collections.abc import Callable


def at_some_deadline(check: Callable[[float], None], *deadlines_s: float) -> None:
    """The check with the first deadline; on a machine too slow for it with the next, which is longer. It fails as it
    does with the last. For claims that hold at each of them where no process is starved, and at none if they are wrong.
    """
    for deadline_s in deadlines_s[:-1]:
        try:
            return check(deadline_s)
        except AssertionError:
            continue
    check(deadlines_s[-1])


def wait_until(holds: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
