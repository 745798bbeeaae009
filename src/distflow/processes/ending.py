"""The end of a process in which a user's code may have left processes, pools and threads that do
not end.

Python's own end waits for threads that are no daemons, for running calls of process pools and for
`multiprocessing`'s processes; it does not wait for `subprocess.Popen`'s.
"""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress

from distflow.processes.descendants import end_descendants

_ENDS_WITHIN_S = 3.0
"""What Python's end may take, before the processes that it waits for are killed; then again, before
it is cut short."""


def end_users_processes_at_exit() -> None:
    """Have processes that are left at the exit of this one killed. Called first, so that it happens
    last."""
    atexit.register(_end_those_left, os.getpid())


def exit_soon(status: int) -> None:
    """Have this process exit with the status within seconds from now, whatever Python's end waits
    for."""
    threading.Thread(target=_cut_short, args=(status,), name="exit", daemon=True).start()


def _end_those_left(process: int) -> None:
    if os.getpid() == process:
        end_descendants()


def _cut_short(status: int) -> None:
    time.sleep(_ENDS_WITHIN_S)
    end_descendants()
    time.sleep(_ENDS_WITHIN_S)
    end_descendants()

    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or its reader has gone
            stream.flush()

    os._exit(status)
