"""How OpenMP threads wait between operations: they spin while the cores are free, and sleep while
others want them."""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

USERS_CHOICE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables by which a user chooses how threads wait. If one is set, nothing here
changes it."""

EVERY_S = 1.0
WANTED = 0.5
"""Threads of this process that wait for a core, on average over an interval, above which others
want the cores."""
QUIET_LOOKS = 3
MOST_QUIET_LOOKS = 96
"""Intervals in a row without such waits after which the threads spin again: at first, and at most.
The number doubles each time, since threads that sleep wait less for cores, whoever else wants
these."""

_TASKS = Path("/proc/self/task")


class SharedCores:
    """A context manager. Inside, a thread watches how long the threads of this process wait for a
    core, and lets the OpenMP threads sleep between operations while that is long.

    libgomp's threads spin for some milliseconds after each operation. On free cores that is faster
    than sleep. Beside other busy processes a spinning thread uses up the time of the thread that it
    waits for. libgomp reads its setting only when it is loaded, but its threads hardly spin while
    the process has more of them than cores. So the switch (`sleep`) is a thread with a team of its
    own, whose members have nothing to do.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._watch: threading.Thread | None = None
        self._holder: threading.Thread | None = None
        self._release = threading.Event()

    def __enter__(self) -> "SharedCores":
        start_team = _find_start_team()
        if start_team is not None and _waits() is not None:
            self._watch = threading.Thread(
                target=self._run, args=(start_team,), name="shared-cores", daemon=True
            )
            self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._watch is not None:
            self._watch.join()

    def sleep(self, start_team: Callable[[], None]) -> None:
        """Let the OpenMP threads of this process sleep between operations."""

        def hold() -> None:
            start_team()
            self._release.wait()  # the team lives as long as its first thread

        if self._holder is None:
            self._release.clear()
            self._holder = threading.Thread(target=hold, name="shared-cores-team", daemon=True)
            self._holder.start()

    def spin(self) -> None:
        """Let them spin again."""
        if self._holder is not None:
            self._release.set()
            self._holder.join()
            self._holder = None

    def _run(self, start_team: Callable[[], None]) -> None:
        before = _waits() or {}
        num_quiet = 0
        enough = QUIET_LOOKS
        while not self._ended.wait(EVERY_S):
            now = _waits() or {}
            if are_wanted(before, now, EVERY_S):
                num_quiet = 0
                self.sleep(start_team)
            else:
                num_quiet += 1
            if self._holder is not None and num_quiet >= enough:
                self.spin()
                enough = min(2 * enough, MOST_QUIET_LOOKS)
            before = now
        self.spin()


def are_wanted(before: dict[int, int], now: dict[int, int], interval_s: float) -> bool:
    """Whether others want the cores, from the nanoseconds that each thread has waited for a core so
    far."""
    waited = sum(total - before[thread] for thread, total in now.items() if thread in before)
    return waited > WANTED * interval_s * 1e9


def _waits() -> dict[int, int] | None:
    """How long each thread of this process has waited for a core so far, in nanoseconds; None if
    the system does not tell."""
    found = dict[int, int]()
    try:
        for thread in os.listdir(_TASKS):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[int(thread)] = int((_TASKS / thread / "schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return found or None


def _find_start_team() -> Callable[[], None] | None:
    """A function that starts more OpenMP threads than there are cores; None if the user chose how
    threads wait, or the OpenMP library is another one than libgomp."""
    from threadpoolctl import threadpool_info

    if any(name in os.environ for name in USERS_CHOICE):
        return None
    files = [pool["filepath"] for pool in threadpool_info() if pool["user_api"] == "openmp"]
    if len(files) != 1 or "libgomp" not in Path(files[0]).name:
        return None
    openmp, system = ctypes.CDLL(files[0]), ctypes.CDLL(None)
    if not hasattr(openmp, "GOMP_parallel"):
        return None
    openmp.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    openmp.GOMP_parallel.restype = None
    nothing = ctypes.cast(system.free, ctypes.c_void_p)  # `free(NULL)` does nothing
    num_threads = len(os.sched_getaffinity(0)) + 1
    return lambda: openmp.GOMP_parallel(nothing, None, num_threads, 0)
