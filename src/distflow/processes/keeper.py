"""Runs a command, and ends everything that it started: once the command or the owner has ended, or
at SIGTERM. SIGUSR2 sends the command a SIGTERM.

The kernel makes each descendant whose parent ended a child of this process, even one in a session
of its own, so that none can leave. Other signals have no effect. The exit status, or the signal
that ended this process, is the command's.

Run by `child.py` in a bare interpreter. Imports only the standard library: nothing here allocates
much, so that the kernel, when memory runs out, ends the command and not the keeper.
"""

import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

from distflow.processes.descendants import descendants, kill_those, running

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOST_OWNER = 1
_KEPT = (signal.SIGKILL, signal.SIGSTOP)
_REAPS_EVERY_MS = 1000
_LOOKS_EVERY_S = 0.02


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
        return {pid for (pid, _), parent in running().items() if parent == own}


def end_children(kept: Collection[int] = ()) -> None:
    """Kill the children of this process but the kept ones, and, after `adopt_orphans`, what they
    leave."""
    while left := children().difference(kept):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main(
    owner_pid: str,
    memory_bytes: str,
    continued: str,
    leaves_s: str,
    removed: str,
    *command: str,
) -> NoReturn:
    """See `Child`."""
    with suppress(ProcessLookupError):
        owner = os.pidfd_open(int(owner_pid))

    if os.getppid() != int(owner_pid):  # it has ended already
        _remove(removed)
        os._exit(_LOST_OWNER)

    asked, ask = os.pipe()
    for number in signal.valid_signals():
        if number not in _KEPT and number < signal.SIGRTMIN:
            # unlike SIG_IGN it is not inherited by the command
            signal.signal(number, lambda *_: None)

    signal.signal(signal.SIGTERM, lambda *_: os.write(ask, b"."))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the owner's thread may block some
    adopt_orphans()
    child = _start(command, int(memory_bytes))
    signal.signal(signal.SIGUSR2, lambda *_: os.kill(child, signal.SIGTERM))
    _close_all_but(owner, asked, ask)
    status = wait_and_end(
        child, (owner, asked), continued=continued == "True", leaves_s=float(leaves_s)
    )
    if select.select([owner], [], [], 0)[0]:
        _remove(removed)

    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)

    os._exit(code)


def wait_and_end(
    child: int, watched: Collection[int], *, continued: bool, leaves_s: float = 0.0
) -> int:
    """Wait until the child has ended, or one of the watched descriptors is readable; then end
    everything below this process, which adopts orphans. Returns the child's wait status.

    continued: a child that is stopped goes on. leaves_s: what the child started gets so many
    seconds to end by itself, as what is below another keeper does.
    """
    ends = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (ends, *watched):
        poll.register(descriptor, select.POLLIN)

    status = None
    while status is None:
        ready = {descriptor for descriptor, _ in poll.poll(_REAPS_EVERY_MS)}
        status = _reap(child, continued)
        if ready.intersection(watched):
            break

    if leaves_s:
        if status is None:
            status = _kill(child)
        due = time.monotonic() + leaves_s
        while children() and time.monotonic() < due:
            _reap(child, continued)
            time.sleep(_LOOKS_EVERY_S)

    # the last first: one that is killed before what it watches would leave that to nobody, if we
    # die now
    kill_those(descendants(os.getpid()))
    if status is None:
        status = _kill(child)
    end_children()
    os.close(ends)

    return status


def _kill(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _reap(child: int, continued: bool) -> int | None:
    """Reap children that have ended; returns the wait status of the child, if it is one of them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return found

        if pid == 0:
            return found

        if os.WIFSTOPPED(status):
            if pid == child and continued:
                os.kill(child, signal.SIGCONT)
        elif pid == child:
            found = status


def _remove(removed: str) -> None:
    if not removed:
        return

    import glob
    import shutil  # both take as long as all the rest here

    for pattern in removed.split("\n"):
        for path in glob.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _close_all_but(*kept: int) -> None:
    """Close what only the command is to have, so that its end is seen by whoever has the other
    ends."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # of the listing itself
                os.close(int(name))


def _start(command: tuple[str, ...], memory_bytes: int) -> int:
    keeper = os.getpid()
    if (pid := os.fork()) == 0:
        die_with_parent(keeper)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if memory_bytes:
            # heap and private mappings: a limit of the address space would count reserved memory
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        os.execvpe(command[0], command, _environment())

    return pid


def _environment() -> dict[bytes, bytes]:
    """What this process was given: Python adds to it where the locale is C."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    return {name: value for name, _, value in pairs}
