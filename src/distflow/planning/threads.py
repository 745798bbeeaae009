"""Threads of the rollout loop and the training loop: together one a core, if both compute at once."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use; `OMP_NUM_THREADS` bounds them, as it bounds each library below."""
    bound = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is for nested regions
    return min(own_cores(), int(bound)) if bound.isdigit() and int(bound) > 0 else own_cores()


def own_cores() -> int:
    """Cores that the system gives this process: those that it may run on, or a container's smaller quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(_CGROUPS, Path("/proc/self/cgroup"))])


def _quotas(root: Path, own: Path) -> Iterator[int]:
    """Quotas of the control groups above this process, in whole cores. own: the file that names its group."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        if number != "0":  # a group of cgroups v1
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _quota(folder / "cpu.max")
    yield from _quota(root / "cpu" / "cpu.cfs_quota_us", root / "cpu" / "cpu.cfs_period_us")


def _quota(*files: Path) -> Iterator[int]:
    """The whole cores of the files' "quota period", or none for a quota of "max" or -1."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
    except (OSError, ValueError):
        return
    if quota not in ("max", "-1"):
        yield max(1, math.ceil(int(quota) / int(period)))


def share_threads(cores: int, trainer: int | None, rollout: int | None) -> tuple[int, int]:
    """Threads of (training, generation). None gets the other cores, at least 1; if both are None, each half."""
    if trainer is None and rollout is None:
        rollout = max(1, cores // 2)
    if trainer is None:
        assert rollout is not None
        return max(1, cores - rollout), rollout
    return trainer, max(1, cores - trainer) if rollout is None else rollout
