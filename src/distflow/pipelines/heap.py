"""The heap of this process, where its C library is glibc."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_THRESHOLD = 2**25  # in bytes; of more glibc takes none


def keep_freed_memory() -> None:
    """What is freed stays with this process, but for blocks of 32 MiB and more. By itself glibc gives the end of its
    heap back to the system whenever that is free, and gets it anew in the next micro-batch, a page fault for every
    4 KiB: 2 to 6 % of a step on a CPU. The peak is the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, -1)  # never
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
