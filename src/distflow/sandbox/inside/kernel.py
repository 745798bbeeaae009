"""Calls of the kernel that the standard library has no function for."""

import ctypes
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long,) * 5
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_CLOSE_RANGE = 436  # on every architecture


def syscall(number: int, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0) -> int:
    """Pointers as addresses. Raises OSError."""
    result: int = _libc.syscall(number, first, second, third, fourth)
    if result < 0:
        raise _error()
    return result


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise _error()


def fork() -> int:
    """`os.fork` without what Python does in the child for the locks of other threads: only for a process that has one
    thread. It copies hundreds of pages and takes longer than the kernel's part. Nor is `random` seeded anew. Raises
    OSError."""
    pid: int = _libc.fork()
    if pid < 0:
        raise _error()
    return pid


def close_from(descriptor: int) -> None:
    """Close this one and all above it, whatever the limit of their number was or is. Raises OSError."""
    syscall(_CLOSE_RANGE, descriptor, 0xFFFFFFFF, 0)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
