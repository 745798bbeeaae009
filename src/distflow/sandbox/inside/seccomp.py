"""The filter of system calls, in classic BPF (linux/seccomp.h): a call that is not on the list fails with EPERM.

It is a list of allowed calls: calls that a kernel adds later stay forbidden. Left out on purpose are calls that reach
other processes (kill, ptrace, process_vm_*, pidfd_*, prlimit of another), start one (fork, clone, exec), reach the
network or the memory of another process (sockets, System V and POSIX shared memory, queues, memfd), change files by
name without opening them, which Landlock would not see (chmod, chown, utimens, setxattr, truncate, link, symlink), use
kernel facilities (io_uring, bpf, perf, userfaultfd, keyctl, inotify, fanotify, mount, namespaces), change properties of
the process (prctl, personality, setuid, setrlimit, sched_*), or reveal them (readlink, mincore, statfs).
"""

import errno
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""As the kernel names them to a filter (linux/audit.h)."""
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

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000  # numbers of the third system call interface of x86-64 kernels
_Instruction = tuple[int, int, int, int]
_Code = list[_Instruction]
_ENDS: tuple[_Instruction, _Instruction] = ((_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM))


def make_filter(machine: str) -> bytes:
    """machine: as in `os.uname()`, a key of `ARCHITECTURES`. A call of another architecture kills the process."""
    special = {
        FCNTL[machine]: _if_argument_in(1, FCNTL_COMMANDS),
        IOCTL[machine]: _if_argument_in(1, IOCTL_REQUESTS),
        PRLIMIT64[machine]: _if_all_zero(0, 2),
        CLONE3[machine]: [_return(_FAIL | errno.ENOSYS)],
        _X32: [_return(_KILL)],
    }
    allow, refuse = ([end] for end in _ENDS)
    by_number = {number: allow for number in ALLOWED[machine].values()} | special
    starts: list[tuple[int, _Code]] = [(0, refuse)]  # (first number, code for it and those up to the next entry)
    for number, code in sorted(by_number.items()):
        if starts[-1][0] == number:
            starts.pop()
        if not starts or starts[-1][1] != code:
            starts.append((number, code))
        if number != _X32 and number + 1 not in by_number:
            starts.append((number + 1, refuse))
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _return(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_search(starts, list(_ENDS))[1],
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _search(starts: list[tuple[int, _Code]], rest: _Code) -> tuple[int, _Code]:
    """A binary search: the kernel evaluates a new filter for every number, each time that a program starts.

    rest: the code that follows, which ends with `_ENDS`. Returns the position of the entry point for these numbers,
    counted from the end, and the whole code."""
    if len(starts) == 1 and starts[0][1][0] in _ENDS:
        return len(_ENDS) - _ENDS.index(starts[0][1][0]), rest
    if len(starts) == 1:
        return len(starts[0][1]) + len(rest), [*starts[0][1], *rest]
    middle = len(starts) // 2
    above, rest = _search(starts[middle:], rest)
    below, rest = _search(starts[:middle], rest)
    jump = (_JUMP_AT_LEAST, len(rest) - above, len(rest) - below, starts[middle][0])
    return len(rest) + 1, [jump, *rest]


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)


def _if_argument_in(index: int, values: tuple[int, ...]) -> _Code:
    """Allow if the lower half is one of the values, as the kernel itself reads a 32-bit argument."""
    code: _Code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]
    for value in values:
        code += [(_JUMP_EQUAL, 0, 1, value), _return(_ALLOW)]
    return [*code, _return(_FAIL | errno.EPERM)]


def _if_all_zero(*indices: int) -> _Code:
    """Allow if these arguments are 0, both halves of each."""
    code: _Code = []
    for offset in (_ARGUMENTS + 8 * index + half for index in indices for half in (0, 4)):
        code += [(_LOAD, 0, 0, offset), (_JUMP_EQUAL, 1, 0, 0), _return(_FAIL | errno.EPERM)]
    return [*code, _return(_ALLOW)]
