"""A fork of this process for what may never end or fill the memory, such as templates of somebody
else."""

import os
import re
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from distflow.processes.channel import Channel
from distflow.processes.keeper import die_with_parent

_FIRST_FREE = 3


@contextmanager
def limited_fork(work: Callable[[Channel], None], more_bytes: int) -> Iterator[Channel]:
    """Meanwhile runs `work` in a fork with the other end of the channel. The fork is killed at the
    end, and with this thread; an exception of `work` is printed, and closes the channel.
    more_bytes: the memory that it may have beside that of this process."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()

    if (fork := os.fork()) == 0:
        try:
            _run(work, theirs, parent, more_bytes)
        except BaseException:  # the fork is not to go on with what its parent does
            traceback.print_exc()
        os._exit(1)

    theirs.close()
    try:
        yield Channel(ours)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        ours.close()


def _run(
    work: Callable[[Channel], None], connected: socket.socket, parent: int, more_bytes: int
) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the one that kills it

    # A connection of the other process is closed only once nobody has it.
    os.closerange(_FIRST_FREE, connected.fileno())
    os.closerange(connected.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    _limit_memory(more_bytes)
    work(Channel(connected))


def _limit_memory(more_bytes: int) -> None:
    """No limit if the system does not report what the process has."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return

    if found := re.search(r"VmData:\s+(\d+) kB", status):
        limit = int(found[1]) * 1024 + more_bytes
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
