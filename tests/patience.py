"""Deadlines for tests in which something healthy must end before a hang is cut, and whether a
process has ended."""

import time
from collections.abc import Callable
from pathlib import Path


def at_some_deadline(check: Callable[[float], None], *deadlines_s: float) -> None:
    """The check with the first deadline; on a machine too slow for it with the next, which is
    longer. It fails as it does with the last. For claims that hold at each of them where no process
    is starved, and at none if they are wrong."""
    for deadline_s in deadlines_s[:-1]:
        try:
            check(deadline_s)
            return
        except AssertionError:
            continue

    check(deadlines_s[-1])


def wait_until(holds: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie does not run: in a container nobody may be there to reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
        return False
    return state not in "ZX"
