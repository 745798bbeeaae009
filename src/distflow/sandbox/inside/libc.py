"""Calls of the kernel that the standard library has no function for.

The calls of the kernel that a program may make, with their numbers by architecture.

A list of what is allowed: whatever a kernel adds later stays forbidden. Left out with intent are all that reach other
processes (kill, ptrace, process_vm_*, pidfd_*, prlimit of another), start one (fork, clone, exec), reach the network or
another process's memory (sockets, System V and POSIX shared memory, queues, memfd), change files by name without
opening them, which Landlock would not see (chmod, chown, utimens, setxattr, truncate, link, symlink), wait on the
kernel's own machinery (io_uring, bpf, perf, userfaultfd, keyctl, inotify, fanotify, mount, namespaces), change what the
process is (prctl, personality, setuid, setrlimit, sched_*), or tell of it (readlink, mincore, statfs).
"""

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


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""As the kernel names them to a filter (linux/audit.h)."""

SECCOMP = {"x86_64": 317, "aarch64": 277}
CAPSET = {"x86_64": 126, "aarch64": 91}
FCNTL = {"x86_64": 72, "aarch64": 25}
IOCTL = {"x86_64": 16, "aarch64": 29}
PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
CLONE3 = {"x86_64": 435, "aarch64": 435}

ALLOWED: dict[str, dict[str, int]] = {
    "x86_64": {
        **{"read": 0, "write": 1, "readv": 19, "writev": 20, "pread64": 17, "pwrite64": 18, "lseek": 8},
        **{"open": 2, "openat": 257, "close": 3, "close_range": 436, "dup": 32, "dup2": 33, "dup3": 292},
        **{"stat": 4, "lstat": 6, "fstat": 5, "newfstatat": 262, "statx": 332, "getdents64": 217, "getcwd": 79},
        **{"access": 21, "faccessat": 269, "faccessat2": 439, "pipe": 22, "pipe2": 293},
        **{"select": 23, "pselect6": 270, "poll": 7, "ppoll": 271},
        **{"mmap": 9, "munmap": 11, "mprotect": 10, "mremap": 25, "brk": 12, "madvise": 28},
        **{"rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127},
        **{"rt_sigsuspend": 130, "rt_sigtimedwait": 128, "sigaltstack": 131, "restart_syscall": 219},
        **{"pause": 34, "alarm": 37, "setitimer": 38, "getitimer": 36},
        **{"nanosleep": 35, "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229},
        **{"gettimeofday": 96, "time": 201, "times": 100, "getrusage": 98, "getrlimit": 97},
        **{"getpid": 39, "getppid": 110, "gettid": 186, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108},
        **{"uname": 63, "getrandom": 318, "sched_yield": 24, "sched_getaffinity": 204, "futex": 202},
        **{"wait4": 61, "waitid": 247, "exit": 60, "exit_group": 231},
    },
    "aarch64": {
        **{"read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "lseek": 62},
        **{"openat": 56, "close": 57, "close_range": 436, "dup": 23, "dup3": 24},
        **{"fstat": 80, "newfstatat": 79, "statx": 291, "getdents64": 61, "getcwd": 17},
        **{"faccessat": 48, "faccessat2": 439, "pipe2": 59, "pselect6": 72, "ppoll": 73},
        **{"mmap": 222, "munmap": 215, "mprotect": 226, "mremap": 216, "brk": 214, "madvise": 233},
        **{"rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "rt_sigpending": 136},
        **{"rt_sigsuspend": 133, "rt_sigtimedwait": 137, "sigaltstack": 132, "restart_syscall": 128},
        **{"setitimer": 103, "getitimer": 102},
        **{"nanosleep": 101, "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114},
        **{"gettimeofday": 169, "times": 153, "getrusage": 165, "getrlimit": 163},
        **{"getpid": 172, "getppid": 173, "gettid": 178, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177},
        **{"uname": 160, "getrandom": 278, "sched_yield": 124, "sched_getaffinity": 123, "futex": 98},
        **{"wait4": 260, "waitid": 95, "exit": 93, "exit_group": 94},
    },
}

FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: not F_SETOWN and F_SETSIG, which send signals to other
processes, nor locks, leases, and the size of pipes."""

IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
