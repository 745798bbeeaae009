"""Runs a command, and ends everything that it started: once the command or the owner has ended, or
at SIGTERM.

The kernel makes each descendant whose parent ended a child of this process, even one in a session
of its own, so that none can leave. Other signals have no effect, and a command that is stopped is
continued. The exit status, or the signal that ended this process, is the command's.

Run as a file, `python -I -S keeper.py OWNER_PID COMMAND...`, by `child.py`. Imports only the
standard library: nothing here allocates much, so that the kernel, when memory runs out, ends the
command and not the keeper.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOST_OWNER = 1
_KEPT = (signal.SIGKILL, signal.SIGSTOP)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process get the signal when the thread that forked it ends; 0 for none. parent: its
    pid."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os._exit(_LOST_OWNER)


def adopt_orphans() -> None:
    """Make descendants of this process its children when their parents end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The children of this process, which has one thread that forks."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except FileNotFoundError:  # a kernel that does not list them
        return {
            int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_of(int(pid)) == own
        }


def parent_of(pid: int) -> int | None:
    """None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def end_children(kept: Collection[int] = ()) -> None:
    """Kill the children of this process but the kept ones, and, after `adopt_orphans`, what they
    leave."""
    while left := children().difference(kept):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main(owner_pid: int, command: list[str]) -> NoReturn:
    owner = _watched(owner_pid)
    wakes, wake = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in signal.valid_signals():
        if number not in _KEPT and number < signal.SIGRTMIN:
            # unlike SIG_IGN it is not inherited by the command
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the owner's thread may block some
    adopt_orphans()
    child = _start(command)
    _close_all_but(owner, wakes, wake)
    status = _wait(child, owner, wakes)
    # one that is killed before what it watches would leave that to nobody, if we die now
    for pid in _lowest_first():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if status is None:
        status = os.waitpid(child, 0)[1]
    end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watched(owner: int) -> int:
    """A descriptor that becomes readable when the owner ends."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(_LOST_OWNER)
    if os.getppid() != owner:
        os._exit(_LOST_OWNER)
    return handle


def _lowest_first() -> list[int]:
    """All descendants of this process, each before its parent."""
    below: dict[int | None, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            below.setdefault(parent_of(int(name)), []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += below.get(pid, [])
    return found[:0:-1]


def _close_all_but(*kept: int) -> None:
    """Close what only the command is to have, so that its end is seen by whoever has the other
    ends."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # of the listing itself
                os.close(int(name))


def _start(command: list[str]) -> int:
    keeper = os.getpid()
    if (pid := os.fork()) == 0:
        die_with_parent(keeper)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(command[0], command)
    return pid


def _wait(child: int, owner: int, wakes: int) -> int | None:
    """The child's wait status, once it has ended; None if the owner has ended, or SIGTERM came."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(wakes, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        with suppress(BlockingIOError):
            os.read(wakes, 2**12)
        if asked or owner in ready:
            return None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                if pid == child:
                    os.kill(child, signal.SIGCONT)
            elif pid == child:
                return status


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
