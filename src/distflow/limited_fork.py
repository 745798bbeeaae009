"""A fork of this process for what may never end or fill the memory, such as templates of
somebody else."""

import ctypes
import multiprocessing
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_FIRST_FREE = 3


@contextmanager
def limited_fork(work: Callable[[Connection], None], name: str) -> Iterator[Connection]:
    """Meanwhile runs `work` in a fork with the other end of the connection. The fork is killed at
    the end, and with this thread; an exception of `work` is printed, and closes the connection."""
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)
    process = forks.Process(
        target=partial(_run, work), args=(theirs, os.getpid()), name=name, daemon=True
    )
    with warnings.catch_warnings():
        # warns about other threads, which the fork does not need
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _run(work: Callable[[Connection], None], channel: Connection, parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the one that kills it
    # A connection of the other process is closed only once nobody has it.
    os.closerange(_FIRST_FREE, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    work(channel)


def limit_memory(more_bytes: int) -> None:
    """Limit memory to a little more than the process has; no limit if the system does not report
    that."""
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
