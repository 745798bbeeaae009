"""Calls of the kernel that the standard library has no function for."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_CLOSE_RANGE = 436  # on every architecture


def syscall(number: int, *arguments: object) -> int:
    """Raises OSError."""
    given = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if _libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def close_from(descriptor: int) -> None:
    """Close this one and all above it, whatever the limit of their number was or is. Raises OSError."""
    syscall(_CLOSE_RANGE, descriptor, 0xFFFFFFFF, 0)
