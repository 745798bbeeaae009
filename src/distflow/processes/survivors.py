"""Kills what a process of ours started and leaves behind, even if it is killed itself. A process
that a keeper cannot be the parent of does its work in `survivors_ended`.

They are known by what a process hands on: a fork has its open pipe, another program its
environment, and what these started are their descendants. A program with an environment of its own
is seen while it still descends from the process. Imports only the standard library.
"""

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from distflow.processes.descendants import (
    Process,
    below,
    ending_by_themselves,
    kill_those,
    running,
    stat_fields,
)
from distflow.processes.interpreters import bare_command

MARK = "DISTFLOW_STARTED_BY"
_LOOKS_EVERY_S = 1.0
_BETWEEN_ROUNDS_S = 0.1
_MOST_ROUNDS = 100
_STATE = 0  # a field of /proc/PID/stat after the name


@contextmanager
def survivors_ended() -> Iterator[None]:
    """Have all processes that this one starts inside killed if it ends meanwhile, in whatever way.
    Not those under a keeper, which ends them. Inside another such block it changes nothing."""
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
    command = bare_command(__name__, process, mark, pipe)
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


def main(owner_pid: str, mark: str, pipe: str) -> None:
    """Wait for the owner's end, and then kill what is left."""
    owner = int(owner_pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    seen = set[Process]()
    with suppress(ProcessLookupError):  # it has ended
        handle = os.pidfd_open(owner)
        while os.getppid() == owner and not select.select([handle], [], [], _LOOKS_EVERY_S)[0]:
            processes = _processes()
            seen &= processes.keys()
            seen.update(below([owner, *(pid for pid, _ in seen)], processes))

    for _ in range(_MOST_ROUNDS):
        processes = _processes()
        left = [each for each in processes if each in seen or _is_marked(each[0], mark, pipe)]
        left += below([pid for pid, _ in left], processes)
        if not left:
            return
        kill_those(left)
        time.sleep(_BETWEEN_ROUNDS_S)


def _processes() -> dict[Process, int]:
    """The running processes but this one and keepers, each with the pid of its parent."""
    found = running()
    for process in list(found):
        if process[0] == os.getpid() or _has_ended(process[0]) or _is_keeper(process[0]):
            del found[process]
    return found


def _has_ended(pid: int) -> bool:
    """Whether only its parent's look at its status is due."""
    with suppress(OSError):
        return stat_fields(pid)[_STATE] in (b"Z", b"X")
    return True


def _is_keeper(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"from distflow.processes.keeper import main" in file.read()
    return False


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
