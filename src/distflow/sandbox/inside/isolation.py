"""Isolation of a process, applied irrevocably before it runs an untrusted program: Landlock, limits, system calls.

Landlock (https://docs.kernel.org/userspace-api/landlock.html) decides which files it may open: those that Python itself
needs. It does not hide whether a file exists and how large it is (`stat`). The standard library has no functions for
these system calls, so they go through libc.
"""

import ctypes
import glob
import os
import platform
import resource
import signal
import stat
import sys
import sysconfig
from typing import NamedTuple

from distflow.sandbox.inside.seccomp import ARCHITECTURES, make_filter

DEVICES_READ = ("/dev/zero", "/dev/random", "/dev/urandom")
DEVICES_WRITTEN = ("/dev/null",)
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
PACKAGES = ("site-packages", "dist-packages")
"""Folders in that of the standard library that are not part of it."""
SECCOMP = {"x86_64": 317, "aarch64": 277}
CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long,) * 5
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
# Numbers that are the same on every architecture.
_CLOSE_RANGE = 436
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_SET_MODE_FILTER = 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = int(signal.SIGKILL)
_CAPABILITY_VERSION = 0x20080522

_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
# All rights that a version knows: to files, to TCP ports, and to sockets and signals of others.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_RIGHTS = 3
_SCOPES = 3

_FIXED_LIMITS = (
    (resource.RLIMIT_STACK, 64 * 2**20),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
)
_LIMITS = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)


class Isolation(NamedTuple):
    """Prepared once and applied by each program: the system call filter and the descriptor of the Landlock rules."""

    machine: str
    filter_: bytes
    ruleset: int


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def fork() -> int:
    """`os.fork` without Python's work in the child for the locks of other threads, which copies hundreds of pages and
    takes longer than the kernel's part: only for a process with one thread. `random` is not seeded again. Raises
    OSError."""
    pid: int = _libc.fork()
    if pid < 0:
        raise _error()
    return pid


def close_from(descriptor: int) -> None:
    """Close this one and all above it, whatever the limit of descriptors is or was. Raises OSError."""
    _syscall(_CLOSE_RANGE, descriptor, 0xFFFFFFFF, 0)


def die_with(parent: int) -> None:
    """Be killed when the process that forked this one ends."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def standard_library() -> str:
    return sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})


def prepare_isolation() -> Isolation:
    """Also drops all privileges of this process. Raises OSError if this kernel does not support it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"no filter of system calls for {machine}: there is one for {', '.join(ARCHITECTURES)}")
    _drop_privileges(machine)
    return Isolation(machine, make_filter(machine), _make_ruleset())


def restrict_files(isolation: Isolation) -> None:
    """Allow only Python's own files. Raises OSError; needs no_new_privs."""
    _syscall(_RESTRICT_SELF, isolation.ruleset, 0)


def restrict_use(isolation: Isolation, cpu_s: int, memory_bytes: int, open_files: int) -> None:
    """Set limits of the kernel, which cannot be raised again, and allow only the listed system calls. Raises OSError;
    needs no_new_privs."""
    # Not readable for other processes of the same user, and never dumped, whatever the machine does with cores.
    _prctl(_PR_SET_DUMPABLE, 0)
    # Soft and hard limits are equal, so that the first signal for CPU time is the one that cannot be caught.
    for limit, value in zip(_LIMITS, (cpu_s, memory_bytes, open_files, 0), strict=True):
        resource.setrlimit(limit, (value, value))
    program = _FilterProgram(len(isolation.filter_) // 8, isolation.filter_)
    _syscall(SECCOMP[isolation.machine], _SET_MODE_FILTER, 0, ctypes.addressof(program))


def _drop_privileges(machine: str) -> None:
    """For this process and its children, which can gain none either. Raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _syscall(CAPSET[machine], ctypes.addressof(header), ctypes.addressof(none))
    for limit, value in _FIXED_LIMITS:
        resource.setrlimit(limit, (value, value))


def _make_ruleset() -> int:
    """A descriptor of Landlock rules. Paths that do not exist are skipped. Raises OSError if the kernel has no Landlock
    or it is off."""
    version = _syscall(_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)
    rights = _Ruleset(
        _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))],
        _NET_RIGHTS if version >= 4 else 0,
        _SCOPES if version >= 6 else 0,
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _syscall(_CREATE_RULESET, ctypes.addressof(rights), size, 0)
    library = standard_library()
    modules = [os.path.join(library, name) for name in os.listdir(library) if name not in PACKAGES]
    shared_libraries = glob.glob(os.path.join(glob.escape(sys.base_prefix), "lib", "*.so*"))  # such as libpython
    for path in (*modules, *shared_libraries, *SYSTEM, *DEVICES_READ):
        _allow(ruleset, path, _READ_FILE)
    for path in DEVICES_WRITTEN:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    """path: a file, or a folder with everything below it."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights |= _READ_DIR
        rule = _PathBeneath(rights, descriptor)
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0)
    finally:
        os.close(descriptor)


def _syscall(number: int, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0) -> int:
    """Pointers are passed as addresses. Raises OSError."""
    result: int = _libc.syscall(number, first, second, third, fourth)
    if result < 0:
        raise _error()
    return result


def _prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise _error()


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
