"""Kills what a process of ours started and leaves behind, even if it is killed itself. A process
that a keeper cannot be the parent of does its work in `survivors_ended`.

They are known by what a process hands on: a fork has its open pipe, another program its
environment, and what these started are their descendants. A program with an environment of its own
is seen while it still descends from the process. Run as a file, `python -I -S survivors.py
OWNER_PID MARK PIPE`. Imports only the standard library.
"""

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

MARK = "DISTFLOW_STARTED_BY"
_LOOKS_EVERY_S = 1.0
_BETWEEN_ROUNDS_S = 0.1
_MOST_ROUNDS = 100
# fields of /proc/PID/stat after the name
_STATE = 0
_PARENT = 1
_STARTED = 19

_Process = tuple[int, bytes]
"""A pid and its start time: together they are unique."""


@contextmanager
def survivors_ended() -> Iterator[None]:
    """Have all processes that this one starts inside killed if it ends meanwhile, in whatever way.
    Not those under a keeper, which ends them. Inside another such block it changes nothing."""
    from distflow.processes.descendants import ending_by_themselves

    process = os.getpid()
    own = f"{process}-"
    before = os.environ.get(MARK)
    if before is not None and before.startswith(own):
        yield
        return
    mark = own + secrets.token_hex(8)
    os.environ[MARK] = mark
    reading, writing = os.pipe()
    pipe = os.readlink(f"/proc/self/fd/{reading}")
    command = [sys.executable, "-I", "-S", __file__, str(process), mark, pipe]
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    watcher = os.posix_spawn(sys.executable, command, {}, file_actions=silent, setsid=True)
    ending_by_themselves.add(watcher)
    try:
        yield
    finally:
        os.close(reading)
        os.close(writing)
        del os.environ[MARK]
        if before is not None:
            os.environ[MARK] = before
        if os.getpid() == process:  # not in a fork that the user's code leaves the block with
            os.kill(watcher, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(watcher, 0)
            ending_by_themselves.discard(watcher)


def without_mark(environment: Mapping[str, str]) -> dict[str, str]:
    """For a program that may live on, or that a keeper ends."""
    return {name: value for name, value in environment.items() if name != MARK}


def main(owner: int, mark: str, pipe: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen = set[_Process]()
    with suppress(ProcessLookupError):  # it has ended
        handle = os.pidfd_open(owner)
        while os.getppid() == owner and not select.select([handle], [], [], _LOOKS_EVERY_S)[0]:
            running = _processes()
            roots = {owner, *(pid for pid, _ in seen & running.keys())}
            seen = _with_descendants(roots, running)
    for _ in range(_MOST_ROUNDS):
        running = _processes()
        known = {pid for pid, _ in running if _is_marked(pid, mark, pipe)}
        known.update(pid for pid, _ in seen & running.keys())
        left = _with_descendants(known, running)
        if not left:
            return
        for pid, _ in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_BETWEEN_ROUNDS_S)


def _processes() -> dict[_Process, int]:
    """The running processes but this one and keepers, each with the pid of its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or is another user's
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if fields[_STATE] not in (b"Z", b"X") and not _is_keeper(name):
                found[int(name), fields[_STARTED]] = int(fields[_PARENT])
    return found


def _is_keeper(pid: str) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"/processes/keeper.py\0" in file.read()


def _with_descendants(roots: set[int], running: Mapping[_Process, int]) -> set[_Process]:
    """The running processes with these pids, and all below them."""
    below: dict[int, list[_Process]] = {}
    for process, parent in running.items():
        below.setdefault(parent, []).append(process)
    found = {process for process in running if process[0] in roots}
    look = list(roots)
    while look:
        for process in below.get(look.pop(), []):
            if process not in found:
                found.add(process)
                look.append(process[0])
    return found


def _is_marked(pid: int, mark: str, pipe: str) -> bool:
    with suppress(OSError):  # it has ended, or is another user's
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                return True
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{name}") == pipe:
                    return True
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
