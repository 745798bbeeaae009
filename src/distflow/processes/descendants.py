"""The descendants of a process, and the end of those that a user's code left."""

import os
import signal
from collections.abc import Collection
from contextlib import suppress

# fields of /proc/PID/stat after the name
_PARENT = 1
_STARTED = 19
_MOST_ROUNDS = 20

Process = tuple[int, str]
"""A pid and its start time: together they are unique."""

ending_by_themselves = set[int]()
"""Children of this process that end when it does, and then end what they started."""


def descendants(root: int, skipped: Collection[int] = ()) -> set[Process]:
    """All descendants of a process, excluding itself. skipped: pids that are left out, with their
    descendants."""
    below: dict[int, list[Process]] = {}
    for process, parent in _processes().items():
        below.setdefault(parent, []).append(process)
    found = set[Process]()
    look = [root]
    while look:
        own = [process for process in below.get(look.pop(), []) if process[0] not in skipped]
        found.update(own)
        look += [pid for pid, _ in own]
    return found


def still_running(processes: set[Process]) -> set[Process]:
    return processes & set(_processes())


def kill_those(processes: set[Process]) -> None:
    for pid, _ in still_running(processes):
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill the descendants of this process, apart from those that end by themselves. It does not
    wait for them."""
    killed = set[Process]()
    for _ in range(_MOST_ROUNDS):  # one may have forked meanwhile
        left = descendants(os.getpid(), ending_by_themselves) - killed
        if not left:
            return
        kill_those(left)
        killed |= left


def _processes() -> dict[Process, int]:
    """The running processes, each with the pid of its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has ended
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                found[int(name), fields[_STARTED]] = int(fields[_PARENT])
    return found
