"""What makes a comparison fair: which settings of a peer are worth their time, and who else keeps
the machine busy."""

import ctypes.util
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

CLEARLY = 1.1
"""A setting that takes this many times as long as the peer's best one in the warm-up is not run
again."""


def worth_it(peer: str, warm_up: Mapping[str, float], most: int | None = None) -> list[str]:
    """The settings that go on, best first, of what each took in the warm-up; says which were
    dropped, and why. most: so many at most."""
    order = sorted(warm_up, key=lambda setting: warm_up[setting])
    least = warm_up[order[0]]
    kept = [setting for setting in order[:most] if warm_up[setting] <= CLEARLY * least]

    dropped = [
        f"{setting} ({warm_up[setting] / least:.2f})" for setting in order if setting not in kept
    ]
    if dropped:
        print(
            (
                f"{peer}, dropped after the warm-up (times the best setting's time): "
                f"{', '.join(dropped)}"
            ),
            flush=True,
        )

    return kept


class Beside:
    """How many cores all other processes of the machine keep busy, from here on."""

    def __init__(self) -> None:
        self._start = _seconds()

    def cores(self) -> float:
        """On average. Of this process's own only those count as its that have ended."""
        (busy, own, now), (busy_0, own_0, start) = _seconds(), self._start
        return max(0.0, busy - busy_0 - (own - own_0)) / (now - start)


def _seconds() -> tuple[float, float, float]:
    """Of all processors busy; of this process and what it waited for; of the clock."""
    user, nice, system, idle, waiting, *rest = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    busy = (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy, sum(usage.ru_utime + usage.ru_stime for usage in usages), time.monotonic()


def tcmalloc(peers: Path) -> str | None:
    """What LD_PRELOAD takes to have it: of `make bench-peers`, or of the system; None where it is
    nowhere."""
    own = sorted(peers.glob("tcmalloc/**/libtcmalloc_minimal.so.4"))
    return str(own[0].resolve()) if own else ctypes.util.find_library("tcmalloc_minimal")
