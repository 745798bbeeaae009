"""Isolation of a process, applied irrevocably before it runs an untrusted program: Landlock,
limits, system calls.

Landlock (https://docs.kernel.org/userspace-api/landlock.html) decides which files it may open:
those that Python itself needs. It does not hide whether a file exists and how large it is (`stat`).
The standard library has no functions for these system calls, so they go through libc.

The filter of system calls is in classic BPF (linux/seccomp.h): a call that is not on the list fails
with EPERM. It is a list of allowed calls (`system_calls.json`): calls that a kernel adds later stay
forbidden. Left out on purpose are calls that reach other processes (kill, ptrace, process_vm_*,
pidfd_*, prlimit of another), start one (fork, clone, exec), reach the network or the memory of
another process (sockets, System V and POSIX shared memory, queues, memfd), change files by name
without opening them, which Landlock would not see (chmod, chown, utimens, setxattr, truncate, link,
symlink), use kernel facilities (io_uring, bpf, perf, userfaultfd, keyctl, inotify, fanotify, mount,
namespaces), change properties of the process (prctl, personality, setuid, setrlimit, sched_*), or
reveal them (readlink, mincore, statfs).
"""

import ctypes
import errno
import glob
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys
import sysconfig
from typing import NamedTuple

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of architectures in a filter (linux/audit.h)."""
FCNTL = {"x86_64": 72, "aarch64": 25}
IOCTL = {"x86_64": 16, "aarch64": 29}
PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
CLONE3 = {"x86_64": 435, "aarch64": 435}

with open(os.path.join(os.path.dirname(__file__), "system_calls.json"), encoding="ascii") as _file:
    ALLOWED: dict[str, dict[str, int]] = json.load(_file)

FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: not F_SETOWN and F_SETSIG, which
send signals to other processes, nor locks, leases, and the size of pipes."""

IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FAIL = 0x00050000
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_X32 = 0x40000000  # numbers of the third system call interface of x86-64 kernels
_Instruction = tuple[int, int, int, int]
_Code = list[_Instruction]


def make_filter(machine: str) -> bytes:
    """machine: as in `os.uname()`, a key of `ARCHITECTURES`. A call of another architecture kills
    the process."""
    special = {
        FCNTL[machine]: _if_argument_in(1, FCNTL_COMMANDS),
        IOCTL[machine]: _if_argument_in(1, IOCTL_REQUESTS),
        PRLIMIT64[machine]: _if_all_zero(0, 2),
        CLONE3[machine]: [_return(_FAIL | errno.ENOSYS)],
    }
    code: _Code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _return(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        _return(_KILL),
    ]
    for number, action in special.items():
        code += [(_JUMP_EQUAL, 0, len(action), number), *action]
    for number in sorted({*ALLOWED[machine].values()} - special.keys()):
        code += [(_JUMP_EQUAL, 0, 1, number), _return(_ALLOW)]
    code.append(_return(_FAIL | errno.EPERM))

    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)


def _if_argument_in(index: int, values: tuple[int, ...]) -> _Code:
    """Allow if the lower half is one of the values, as the kernel itself reads a 32-bit
    argument."""
    code: _Code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]
    for value in values:
        code += [(_JUMP_EQUAL, 0, 1, value), _return(_ALLOW)]
    return [*code, _return(_FAIL | errno.EPERM)]


def _if_all_zero(*indices: int) -> _Code:
    """Allow if these arguments are 0, both halves of each."""
    code: _Code = []
    for index in indices:
        for half in (0, 4):
            offset = _ARGUMENTS + 8 * index + half
            code += [(_LOAD, 0, 0, offset), (_JUMP_EQUAL, 1, 0, 0), _return(_FAIL | errno.EPERM)]
    return [*code, _return(_ALLOW)]


DEVICES_READ = ("/dev/zero", "/dev/random", "/dev/urandom")
DEVICES_WRITTEN = ("/dev/null",)
SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
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
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_SET_MODE_FILTER = 1
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = int(signal.SIGKILL)
_CAPABILITY_VERSION = 0x20080522

_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
# All rights that a version knows: to files, to TCP ports, and to others' sockets and signals.
_FILE_RIGHTS = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
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
    """Prepared once and applied by each program."""

    machine: str
    filter_: bytes
    """Of system calls."""
    ruleset: int
    """The descriptor of the Landlock rules."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def fork() -> int:
    """`os.fork` without Python's work in the child for the locks of other threads, which copies
    hundreds of pages and takes longer than the kernel's part; only for a process with one thread.
    `random` is not reseeded. Raises OSError."""
    pid: int = _libc.fork()
    if pid < 0:
        raise _error()
    return pid


def close_from(descriptor: int) -> None:
    """Close this descriptor and all above it, whatever the limit is or was. Raises OSError."""
    _syscall(_CLOSE_RANGE, descriptor, 0xFFFFFFFF, 0)


def die_with(parent: int) -> None:
    """Have this process killed when the process that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def standard_library() -> str:
    return sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})


def prepare_isolation() -> Isolation:
    """Also drops all privileges of this process. Raises OSError if the kernel does not support
    it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(
            f"no filter of system calls for {machine}: there is one for {', '.join(ARCHITECTURES)}"
        )

    _drop_privileges(machine)
    return Isolation(machine, make_filter(machine), _make_ruleset())


def restrict_files(isolation: Isolation) -> None:
    """Allow only Python's own files. Raises OSError; needs no_new_privs."""
    _syscall(_RESTRICT_SELF, isolation.ruleset, 0)


def restrict_use(isolation: Isolation, cpu_s: int, memory_bytes: int, open_files: int) -> None:
    """Set kernel limits, which cannot be raised again, and allow only the listed system calls.
    Raises OSError; needs no_new_privs."""
    # Not readable for other processes of the same user, and never dumped, whatever the machine's
    # core settings.
    _prctl(_PR_SET_DUMPABLE, 0)

    # Soft and hard limits are equal, so that the first signal for CPU time is the one that cannot
    # be caught.
    for limit, value in zip(_LIMITS, (cpu_s, memory_bytes, open_files, 0), strict=True):
        resource.setrlimit(limit, (value, value))
    program = _FilterProgram(len(isolation.filter_) // 8, isolation.filter_)
    _syscall(SECCOMP[isolation.machine], _SET_MODE_FILTER, 0, ctypes.addressof(program))


def _drop_privileges(machine: str) -> None:
    """Drop privileges of this process and its children, which cannot gain any either. Raises
    OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _syscall(CAPSET[machine], ctypes.addressof(header), ctypes.addressof(none))
    for limit, value in _FIXED_LIMITS:
        resource.setrlimit(limit, (value, value))


def _make_ruleset() -> int:
    """A descriptor of Landlock rules, without missing paths. Raises OSError if the kernel lacks
    Landlock or it is off."""
    version = _syscall(_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)
    rights = _Ruleset(
        _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))],
        _NET_RIGHTS if version >= 4 else 0,
        _SCOPES if version >= 6 else 0,
    )

    if version < 4:
        size = 8
    elif version < 6:
        size = 16
    else:
        size = 24

    ruleset = _syscall(_CREATE_RULESET, ctypes.addressof(rights), size, 0)
    library = standard_library()
    modules = [os.path.join(library, name) for name in os.listdir(library) if name not in PACKAGES]

    # such as libpython
    shared_libraries = glob.glob(os.path.join(glob.escape(sys.base_prefix), "lib", "*.so*"))
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
