"""Landlock: which files a program may open. https://docs.kernel.org/userspace-api/landlock.html

It does not keep a program from asking whether a file is there and how large it is (`stat`).
"""

import ctypes
import os
import stat
from collections.abc import Iterable

from distflow.sandbox.inside.libc import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
# All rights to files that a version knows, to TCP ports, and to sockets and signals of others.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_RIGHTS = 3
_SCOPES = 3


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def version() -> int:
    """Raises OSError where the kernel has none, or it is off."""
    return syscall(_CREATE_RULESET, 0, 0, _VERSION)


def make_ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """A descriptor. readable: files, and folders with all below them. writable: files that may also be written.
    What is not there is passed over. Raises OSError."""
    known = version()
    rights = _Ruleset(
        _FILE_RIGHTS[min(known, max(_FILE_RIGHTS))], _NET_RIGHTS if known >= 4 else 0, _SCOPES if known >= 6 else 0
    )
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = syscall(_CREATE_RULESET, ctypes.addressof(rights), size, 0)
    for path in readable:
        _allow(ruleset, path, _READ_FILE)
    for path in writable:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """From here on, for this process. Raises OSError; needs no_new_privs."""
    syscall(_RESTRICT_SELF, ruleset, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights |= _READ_DIR
        rule = _PathBeneath(rights, descriptor)
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0)
    finally:
        os.close(descriptor)
