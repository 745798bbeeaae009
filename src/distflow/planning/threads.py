"""How many threads compute in either plane: together as many as there are cores, where both compute at once."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use; `OMP_NUM_THREADS` bounds them, as it bounds each library below."""
    bound = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is of nested regions
    return min(own_cores(), int(bound)) if bound.isdigit() and int(bound) > 0 else own_cores()


def own_cores() -> int:
    """Cores that the system lets this process have: those that it may run on, less where a container's share of time is
    less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(_CGROUPS, Path("/proc/self/cgroup"))])


def _quotas(root: Path, own: Path) -> Iterator[int]:
    """What each control group above this process grants it, in whole cores. own: the file that names its group."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        if number != "0":  # of the first version
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _quota(folder / "cpu.max")
    yield from _first_version_quota(root / "cpu")


def _quota(file: Path) -> Iterator[int]:
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return
    if quota != "max":
        yield max(1, math.ceil(int(quota) / int(period)))


def _first_version_quota(folder: Path) -> Iterator[int]:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return
    if quota > 0:
        yield max(1, math.ceil(quota / period))


def share_threads(cores: int, trainer: int | None, rollout: int | None) -> tuple[int, int]:
    """Threads of (training, generation). One that is None gets the other cores, at least 1; if both are, each half."""
    if trainer is None and rollout is None:
        rollout = max(1, cores // 2)
    if trainer is None:
        assert rollout is not None
        return max(1, cores - rollout), rollout
    return trainer, max(1, cores - trainer) if rollout is None else rollout
