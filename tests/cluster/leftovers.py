"""What a run's processes hold of the machine: themselves, listening ports, shared memory."""

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"


@dataclass(frozen=True)
class Held:
    """pids, inodes of sockets that listen, and files of /dev/shm."""

    pids: frozenset[int]
    listening: frozenset[str]
    shared: frozenset[str]

    @staticmethod
    def below(root: int) -> "Held":
        """By all processes that descend from one, it not included."""
        pids = frozenset(_descendants(root))
        opened = {target for pid in pids for target in _opened(pid)}
        sockets = {
            target[len("socket:[") : -1] for target in opened if target.startswith("socket:[")
        }
        shared = {
            target
            for target in opened
            if target.startswith("/dev/shm/") and not target.endswith(" (deleted)")
        }

        return Held(pids, frozenset(sockets & _listening()), frozenset(shared))

    def left(self) -> "Held":
        """What of it is still there."""
        pids = frozenset(pid for pid in self.pids if _lives(pid))
        shared = frozenset(path for path in self.shared if os.path.exists(path))
        return Held(pids, self.listening & _listening(), shared)

    def __bool__(self) -> bool:
        return bool(self.pids or self.listening or self.shared)


def named(name: str, root: int) -> list[int]:
    """Pids of those below `root` that call themselves so, oldest first; not those of their
    keepers."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args", "--sort", "start_time"], capture_output=True, text=True
    ).stdout
    below = _descendants(root)

    found = []
    for line in listed.splitlines():
        pid = line.split()[0]
        if name in line and "distflow.processes.keeper" not in line and pid.isdigit():
            found.append(int(pid))

    return [pid for pid in found if pid in below]


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for line in subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True
    ).stdout.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)

    found = set[int]()
    look = [root]
    while look:
        below = children.get(look.pop(), [])
        found.update(below)
        look += below

    return found


def _opened(pid: int) -> list[str]:
    targets = []
    with suppress(OSError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                targets.append(os.readlink(descriptor))
    return targets


def _listening() -> frozenset[str]:
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return frozenset(fields[9] for fields in lines if fields[3] == _LISTENS)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
