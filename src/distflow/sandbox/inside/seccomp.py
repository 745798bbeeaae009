"""The filter of system calls, in classic BPF (linux/seccomp.h): what it does not name fails with EPERM."""

import ctypes
import errno
import struct

from distflow.sandbox.inside.libc import (
    ALLOWED,
    ARCHITECTURES,
    CLONE3,
    FCNTL,
    FCNTL_COMMANDS,
    IOCTL,
    IOCTL_REQUESTS,
    PRLIMIT64,
    SECCOMP,
    syscall,
)

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000  # the numbers of the third interface that x86-64 kernels may have
_SET_MODE_FILTER = 1
_Instruction = tuple[int, int, int, int]
_Code = list[_Instruction]
_ENDS: tuple[_Instruction, _Instruction] = ((_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM))


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def make_filter(machine: str) -> bytes:
    """machine: as `os.uname()` has it, a key of `ARCHITECTURES`. Another architecture's calls kill the process."""
    special = {
        FCNTL[machine]: _if_argument_in(1, FCNTL_COMMANDS),
        IOCTL[machine]: _if_argument_in(1, IOCTL_REQUESTS),
        PRLIMIT64[machine]: _if_all_zero(0, 2),
        CLONE3[machine]: [_return(_FAIL | errno.ENOSYS)],
        _X32: [_return(_KILL)],
    }
    allow, refuse = ([end] for end in _ENDS)
    by_number = {number: allow for number in ALLOWED[machine].values()} | special
    starts: list[tuple[int, _Code]] = [(0, refuse)]  # from this number on
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


def install(filter_: bytes, machine: str) -> None:
    """From here on, for this process. Raises OSError; needs no_new_privs."""
    program = _Program(len(filter_) // 8, filter_)
    syscall(SECCOMP[machine], _SET_MODE_FILTER, 0, ctypes.addressof(program))


def _search(starts: list[tuple[int, _Code]], behind: _Code) -> tuple[int, _Code]:
    """By halves: the kernel tries a new filter with every number there is, each time that a program is started.

    behind: the code that follows, which ends with `_ENDS`. Returns where the answer for these numbers begins, counted
    from the end, and all the code."""
    if len(starts) == 1 and starts[0][1][0] in _ENDS:
        return len(_ENDS) - _ENDS.index(starts[0][1][0]), behind
    if len(starts) == 1:
        return len(starts[0][1]) + len(behind), [*starts[0][1], *behind]
    middle = len(starts) // 2
    above, behind = _search(starts[middle:], behind)
    below, behind = _search(starts[:middle], behind)
    jump = (_JUMP_AT_LEAST, len(behind) - above, len(behind) - below, starts[middle][0])
    return len(behind) + 1, [jump, *behind]


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)


def _if_argument_in(index: int, values: tuple[int, ...]) -> _Code:
    """Allow where the lower half is one of the values, as the kernel itself reads an argument of 32 bits."""
    code: _Code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]
    for value in values:
        code += [(_JUMP_EQUAL, 0, 1, value), _return(_ALLOW)]
    return [*code, _return(_FAIL | errno.EPERM)]


def _if_all_zero(*indices: int) -> _Code:
    """Allow where these arguments are 0, both halves of each."""
    code: _Code = []
    for offset in (_ARGUMENTS + 8 * index + half for index in indices for half in (0, 4)):
        code += [(_LOAD, 0, 0, offset), (_JUMP_EQUAL, 1, 0, 0), _return(_FAIL | errno.EPERM)]
    return [*code, _return(_ALLOW)]
