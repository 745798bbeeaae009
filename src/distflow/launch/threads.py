"""The cores of a run: its threads for training and generation, and the heap of its process."""

import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from distflow.config import Config
from distflow.config.derived_settings import is_rl
from distflow.errors import UserError, count_of
from distflow.planning.plan import Plan, dp_groups_of
from distflow.runtime.spec import Spec
from distflow.runtime.worker_place import Home, Place


def threads_of(config: Config) -> tuple[int | None, int | None]:
    """Threads of (training, generation) in each worker. None for training: torch's default, or a
    worker's share of
    its machine. None for generation: the training thread generates while it waits."""
    if not is_rl(config) or config.async_.max_staleness == 0:
        return config.trainer.num_threads, None
    trainer = config.trainer.num_threads
    rollout = config.actor_rollout_ref.rollout.num_threads
    return share_threads(worker_cores(config), trainer, rollout)


def worker_cores(config: Config) -> int:
    return max(1, usable_cores() // config.trainer.n_gpus_per_node)


_WORKERS_A_CORE = 4


def check_cores(plan: Plan, more_advice: str = "") -> None:
    """Raises UserError for more workers on the CPU than this machine could run without being
    hopelessly slow."""
    num_workers = sum(rank.device == "cpu" for rank in plan.ranks)
    cores = os.cpu_count() or 1
    if num_workers > _WORKERS_A_CORE * cores:
        raise UserError(
            f"the plan is for {count_of(num_workers, 'worker')} on CPUs, but this machine has "
            f"{cores} cores, which {_WORKERS_A_CORE * cores} can share at most: reduce "
            f"trainer.n_gpus_per_node or trainer.allocation{more_advice}"
        )


def places_of(spec: Spec) -> list[Place]:
    """The place of each worker, by rank. Workers of one machine share its cores."""
    ranks = spec.plan.ranks
    dp_groups = dp_groups_of(spec.plan)
    home = Home.of_driver()
    generators = tuple(rank.rank for rank in ranks if rank.rollout_nodes)
    trainer = spec.config.trainer.num_threads
    rollout = spec.config.actor_rollout_ref.rollout.num_threads

    places = []
    for rank in ranks:
        cores = worker_cores(spec.config)
        threads = trainer or cores
        if spec.data.max_staleness and rank.training_nodes and "rollout" in rank.engines:
            # of the training loop: its engine computes meanwhile
            threads = share_threads(cores, trainer, rollout)[0]

        number = generators.index(rank.rank) if rank.rank in generators else -1

        places.append(Place(rank.rank, dp_groups, generators, threads, home, number))

    return places


# mallopt(3)
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 2**25  # in bytes; glibc accepts no more
_MAX_THREADS = 1024


def make_process_ready(config: Config) -> None:
    """Set up the process's heap, and its number of threads before any starts, since results are
    bit-equal only for the same number. Raises UserError for an absurd one."""
    keep_freed_memory()
    avoid_cudnn_attention()

    trainer, rollout = threads_of(config)
    for key, threads in (("trainer", trainer), ("actor_rollout_ref.rollout", rollout)):
        if (threads or 0) > _MAX_THREADS:
            most = f"set it to at most the cores of this machine, {os.cpu_count()}"
            raise UserError(f"{key}.num_threads={threads}: {most}")

    if trainer is None and "OMP_NUM_THREADS" not in os.environ:  # the user's choice
        trainer = min(torch.get_num_threads(), own_cores())  # torch ignores a container's CPU quota
    if trainer is not None:
        torch.set_num_threads(trainer)


def keep_freed_memory() -> None:
    """Keep freed memory in this process, except for blocks of 32 MiB and more. By default glibc
    returns the free end of its heap to the system, and gets it again in the next micro-batch, with
    a page fault for every 4 KiB: 2 to 6 % of a step on a CPU. The peak is the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, -1)  # never trim
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


def avoid_cudnn_attention() -> None:
    """Have torch choose among its own kernels. cuDNN plans each shape of a batch, in each thread,
    which takes 50 ms; in reinforcement learning shapes rarely repeat."""
    torch.backends.cuda.enable_cudnn_sdp(False)


_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use, limited by `OMP_NUM_THREADS` as in the libraries below."""
    # a list applies to nested regions
    bound = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if bound.isdigit() and int(bound) > 0:
        return min(own_cores(), int(bound))
    return own_cores()


def own_cores() -> int:
    """Cores that the system gives this process: its affinity, or a container's smaller quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *_quotas(_CGROUPS, Path("/proc/self/cgroup"))])


def _quotas(root: Path, own: Path) -> Iterator[int]:
    """Quotas of the control groups above this process, in whole cores. own: the file that names its
    group."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
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
    """Threads of (training, generation). None gets the remaining cores, at least 1; if both are
    None, half each."""
    if trainer is None and rollout is None:
        rollout = max(1, cores // 2)
    if trainer is None:
        assert rollout is not None
        return max(1, cores - rollout), rollout
    return trainer, max(1, cores - trainer) if rollout is None else rollout
