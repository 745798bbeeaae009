"""How OpenMP threads wait between operations: they spin while the cores are free, and sleep while
others want them."""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

USERS_CHOICE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables by which a user chooses how threads wait. If one is set, nothing here
changes it."""

EVERY_S = 1.0
WAITING = 0.5
"""Threads of this process that wait for a core, on average over an interval."""
OTHERS = 0.25
"""Cores that processes of others keep busy, on average over an interval."""
BUSY_LOOKS = 2
"""Intervals in a row in which more threads wait, and others keep more cores busy, after which
others want the cores. One alone may be the start of another program."""
QUIET_LOOKS = 3
MOST_QUIET_LOOKS = 96
"""Intervals in a row without that, after which the threads spin again: at first, and at most.
The number doubles each time, since threads that sleep wait less for cores, whoever else wants
these."""

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Look:
    """What the system has counted so far."""

    waited_ns: Mapping[int, int]
    """How long each thread of this process has waited for a core."""
    busy_s: float
    """Of all cores that this process may use."""
    own_s: float
    """Processor time of this process and of those that it started."""

    @staticmethod
    def now() -> "Look | None":
        """None if the system does not tell."""
        try:
            return Look(_waited_ns(), _busy_s(), own_s(os.getpid()))
        except (OSError, IndexError, ValueError):
            return None


class SharedCores:
    """A context manager. Inside, a thread watches whether others want the cores (`are_wanted`), and
    lets the OpenMP threads sleep between operations while they do.

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
        if start_team is not None and Look.now() is not None:
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
        before = Look.now()
        num_busy = 0
        num_quiet = 0
        enough = QUIET_LOOKS
        while not self._ended.wait(EVERY_S):
            now = Look.now()
            if before is not None and now is not None and are_wanted(before, now, EVERY_S):
                num_busy += 1
                num_quiet = 0
            else:
                num_busy = 0
                num_quiet += 1

            if num_busy >= BUSY_LOOKS:
                self.sleep(start_team)

            if self._holder is not None and num_quiet >= enough:
                self.spin()
                enough = min(2 * enough, MOST_QUIET_LOOKS)

            before = now

        self.spin()


def are_wanted(before: Look, now: Look, interval_s: float) -> bool:
    """Whether others want the cores: threads of this process wait for a core, and not only for each
    other or for processes that it started, such as those of rewards."""
    waited_ns = 0
    for thread, total in now.waited_ns.items():
        waited_ns += total - before.waited_ns.get(thread, total)
    others_s = now.busy_s - before.busy_s - (now.own_s - before.own_s)
    return waited_ns > WAITING * interval_s * 1e9 and others_s > OTHERS * interval_s


def _waited_ns() -> dict[int, int]:
    found = dict[int, int]()
    for thread in os.listdir(_PROC / "self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            schedstat = (_PROC / "self/task" / thread / "schedstat").read_bytes()
            found[int(thread)] = int(schedstat.split()[1])
    return found


def _busy_s() -> float:
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *counts = line.split()
        if name in cores:
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, counts[:7])
            busy += user + nice + system + interrupts + soft_interrupts

    return busy / _TICKS_PER_S


def own_s(process: int) -> float:
    """Processor time of a process and of all that it started, including those that have ended and
    were waited for; 0 if it has ended."""
    total = 0.0
    with suppress(FileNotFoundError, ProcessLookupError):
        # behind the name, which may hold anything: utime, stime, cutime, cstime
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15])) / _TICKS_PER_S
        for thread in os.listdir(_PROC / str(process) / "task"):
            children = (_PROC / str(process) / "task" / thread / "children").read_text()
            total += sum(own_s(int(child)) for child in children.split())

    return total


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
