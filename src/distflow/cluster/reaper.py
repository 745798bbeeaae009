"""A process that briefly outlives the driver of a Ray, and kills what is left of that Ray's processes.

Ray ends its workers when their driver dies, but some of its helpers check for their parent only occasionally.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

_LOOKS_EVERY_S = 0.5
_PARENT, _STARTED = 1, 19  # fields of /proc/PID/stat after the name

Process = tuple[int, str]
"""A pid and its start time: together they are unique."""


def main(token: str, driver: int) -> None:
    """token: a file to remove at the end. driver: pid of the process that holds the other end of standard input, where
    it writes a byte when it has ended normally."""
    others, known = descendants(driver), set[Process]()
    while not select.select([sys.stdin], [], [], _LOOKS_EVERY_S)[0]:
        known |= descendants(driver) - others
    if not sys.stdin.buffer.read(1):
        kill_those(known | descendants(driver) - others)
    Path(token).unlink(missing_ok=True)


def kill_those(processes: set[Process]) -> None:
    for pid, _ in processes & set(_processes()):
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> set[Process]:
    """All descendants of a process, excluding itself."""
    children: dict[int, list[Process]] = {}
    for process, parent in _processes().items():
        children.setdefault(parent, []).append(process)
    found, look = set[Process](), [root]
    while look:
        below = children.get(look.pop(), [])
        found.update(below)
        look += [pid for pid, _ in below]
    return found


def _processes() -> dict[Process, int]:
    """The running processes, each with the pid of its parent."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name), fields[_STARTED]] = int(fields[_PARENT])
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
