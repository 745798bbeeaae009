"""The running processes, and those below one. Imports only the standard library, as what imports it
does."""

import os
import signal
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

# fields of /proc/PID/stat after the name
_PARENT = 1
_STARTED = 19
_MOST_ROUNDS = 20

Process = tuple[int, bytes]
"""A pid and its start time: together they are unique."""

ending_by_themselves = set[int]()
"""Children of this process that end when it does, and then end what they started."""


def running() -> dict[Process, int]:
    """The running processes, each with the pid of its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has ended
                fields = stat_fields(int(name))
                found[int(name), fields[_STARTED]] = int(fields[_PARENT])

    return found


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name. Raises OSError if the process has ended."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def below(
    roots: Iterable[int], processes: Mapping[Process, int], skipped: Collection[int] = ()
) -> list[Process]:
    """All of the processes that descend from these pids, each after its parent. skipped: pids that
    are left out, with their descendants."""
    children: dict[int, list[Process]] = {}
    for process, parent in processes.items():
        if process[0] not in skipped:
            children.setdefault(parent, []).append(process)

    found = list[Process]()
    for root in roots:
        found += children.pop(root, [])
    for pid, _ in found:
        found += children.pop(pid, [])
    return found


def descendants(root: int) -> list[Process]:
    """All descendants of a process, each after its parent."""
    return below([root], running())


def kill_those(processes: Iterable[Process]) -> None:
    """Kill those that still run, the last first."""
    alive = running()
    for process in reversed(list(processes)):
        if process in alive and process[0] != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process[0], signal.SIGKILL)


def end_descendants() -> None:
    """Kill the descendants of this process, apart from those that end by themselves. It does not
    wait for them."""
    killed = set[Process]()
    for _ in range(_MOST_ROUNDS):  # one may have forked meanwhile
        found = below([os.getpid()], running(), ending_by_themselves)
        left = [process for process in found if process not in killed]
        if not left:
            return
        kill_those(left)
        killed.update(left)
