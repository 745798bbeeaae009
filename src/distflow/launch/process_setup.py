"""Sets up the memory and the threads of a process before a run computes in it."""

import ctypes
import os

import torch

from distflow.config import Config
from distflow.errors import UserError
from distflow.launch.devices import threads_of
from distflow.planning.threads import own_cores

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_THRESHOLD = 2**25  # in bytes; glibc accepts no more
_MAX_THREADS = 1024


def make_process_ready(config: Config) -> None:
    """Set up its heap, and its threads before any of them starts: results are bit-equal for one number of threads only.
    Raises UserError for an absurd number."""
    keep_freed_memory()
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
    """Keep freed memory in this process, but for blocks of 32 MiB and more. By default glibc returns the end of its
    heap to the system whenever that is free, and gets it again in the next micro-batch, with a page fault for every 4
    KiB: 2 to 6 % of a step on a CPU. The peak is the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, -1)  # never
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
