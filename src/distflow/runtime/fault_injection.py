"""Fault injection for tests: points in the code at which processes are killed, stopped or delayed.

Off unless the environment variable DISTFLOW_FAULTS names a JSON file with a list of faults when a
worker starts. Each point then counts how often it is reached; a due fault records that it fires,
and hits this process.
"""

import errno
import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

VARIABLE: Final = "DISTFLOW_FAULTS"
_LONG_S: Final = 3600.0


@dataclass(frozen=True)
class Fault:
    """What hits a worker, and when."""

    point: str
    """The argument of `reach`."""
    rank: int
    call: int = 1
    """The visit of the point at which it fires, from 1."""
    action: Literal["SIGKILL", "SIGSTOP", "sleep", "full", "flip"] = "SIGKILL"
    """A signal, a long sleep, a full disk, or a flipped bit in the bytes at the point."""
    again: bool = False
    """Also fires in processes that replace one that it hit."""


# faults of this process, by their number in the plan; None until it is armed
_own: dict[int, Fault] | None = None
_reached: Counter[str] = Counter()
_lock = threading.Lock()


def arm(rank: int) -> None:
    """Load the faults, at the start of a worker's process."""
    global _own
    plan = Path(os.environ.get(VARIABLE, ""))
    if plan.is_file():
        before = fired(plan)
        faults = {number: Fault(**each) for number, each in enumerate(json.loads(plan.read_text()))}
        _reached.clear()
        _own = {
            n: each
            for n, each in faults.items()
            if each.rank == rank and (each.again or n not in before)
        }


def reach(point: str, data: memoryview | None = None) -> None:
    """Called where this process reaches the point. data: bytes at the point."""
    if _own is None:
        return

    with _lock:
        _reached[point] += 1
        here = (point, _reached[point])

    for number, fault in _own.items():
        if (fault.point, fault.call) == here:
            file = _fired_file(Path(os.environ[VARIABLE]))
            with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as log:
                log.write(f"{number}\n")
            _strike(fault, data)


def fired(plan: Path) -> list[int]:
    """Numbers of the faults of a plan that have fired, in order."""
    file = _fired_file(plan)
    if file.exists():
        return [int(line) for line in file.read_text().split()]
    return []


def _fired_file(plan: Path) -> Path:
    return plan.with_suffix(".fired")


def _strike(fault: Fault, data: memoryview | None) -> None:
    if fault.action == "sleep":
        time.sleep(_LONG_S)
    elif fault.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.action == "flip":
        assert data, "bytes to flip a bit of"
        data[len(data) // 2] ^= 1
    else:
        os.kill(os.getpid(), signal.Signals[fault.action])
