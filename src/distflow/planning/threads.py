"""How many threads compute in either plane: together as many as there are cores, where both compute at once."""

import os


def usable_cores() -> int:
    """Cores that this process may run on; `OMP_NUM_THREADS` bounds them, as it bounds each library below."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bound = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(bound)) if bound.isdigit() and int(bound) > 0 else cores


def share_threads(cores: int, trainer: int | None, rollout: int | None) -> tuple[int, int]:
    """(training's, generation's): what is not given is the rest of the cores, at least 1; of nothing given, half."""
    if trainer is None and rollout is None:
        rollout = max(1, cores // 2)
    if trainer is None:
        assert rollout is not None
        return max(1, cores - rollout), rollout
    return trainer, max(1, cores - trainer) if rollout is None else rollout
