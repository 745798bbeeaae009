"""Kills what a process of ours started and leaves behind, even if it is killed itself. A process
that a keeper cannot be the parent of calls `end_survivors`.

They are known by what a process hands on: a fork has its open pipe, another program its
environment, and what these started are their descendants. Run as a file, `python -I -S survivors.py
OWNER_PID MARK PIPE`. Imports only the standard library.
"""

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

MARK = "DISTFLOW_STARTED_BY"
_BETWEEN_ROUNDS_S = 0.1
_MOST_ROUNDS = 100


@cache
def end_survivors() -> int:
    """Have all processes that this one starts from now on killed once it has ended, in whatever
    way. Not those under a keeper, which ends them. Returns the pid of the process that does so."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[MARK] = mark
    pipe = os.readlink(f"/proc/self/fd/{os.pipe()[0]}")
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, pipe]
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(sys.executable, command, {}, file_actions=silent, setsid=True)


def without_mark(environment: Mapping[str, str]) -> dict[str, str]:
    """For a program that may live on, or that a keeper ends."""
    return {name: value for name, value in environment.items() if name != MARK}


def main(owner: int, mark: str, pipe: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):  # it has ended
        handle = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([handle], [], [])
    for _ in range(_MOST_ROUNDS):
        left = _survivors(mark, pipe)
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_BETWEEN_ROUNDS_S)


def _survivors(mark: str, pipe: str) -> list[int]:
    below: dict[int, list[int]] = {}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or is another user's
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X"):
                continue
            below.setdefault(int(parent), []).append(int(name))
            if _is_marked(name, mark, pipe):
                found.append(int(name))
    for pid in found:
        found += [each for each in below.get(pid, []) if each not in found]
    return found


def _is_marked(pid: str, mark: str, pipe: str) -> bool:
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
