"""The filter of system calls, in classic BPF (linux/seccomp.h): what it does not name fails with EPERM."""

import ctypes
import errno
import struct

from distflow.sandbox.inside.kernel import syscall
from distflow.sandbox.inside.syscalls import (
    ALLOWED,
    ARCHITECTURES,
    CLONE3,
    FCNTL,
    FCNTL_COMMANDS,
    IOCTL,
    IOCTL_REQUESTS,
    PRLIMIT64,
    SECCOMP,
)

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000  # the numbers of the third interface that x86-64 kernels may have
_SET_MODE_FILTER = 1
_Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def make_filter(machine: str) -> bytes:
    """machine: as `os.uname()` has it, a key of `ARCHITECTURES`. Another architecture's calls kill the process."""
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in ALLOWED[machine].values():
        code += _if_number(number, [(_RETURN, 0, 0, _ALLOW)])
    code += _if_number(FCNTL[machine], _if_argument_in(1, FCNTL_COMMANDS))
    code += _if_number(IOCTL[machine], _if_argument_in(1, IOCTL_REQUESTS))
    code += _if_number(PRLIMIT64[machine], _if_all_zero(0, 2))
    code += _if_number(CLONE3[machine], [_error(errno.ENOSYS)])
    code.append(_error(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install(filter_: bytes, machine: str) -> None:
    """From here on, for this process. Raises OSError; needs no_new_privs."""
    program = _Program(len(filter_) // 8, filter_)
    syscall(SECCOMP[machine], _SET_MODE_FILTER, 0, ctypes.byref(program))


def _error(code: int) -> _Instruction:
    return (_RETURN, 0, 0, 0x00050000 | code)


def _if_number(number: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_JUMP_EQUAL, 0, len(then), number), *then]


def _if_argument_in(index: int, values: tuple[int, ...]) -> list[_Instruction]:
    """Allow where the lower half is one of the values, as the kernel itself reads an argument of 32 bits."""
    code: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]
    for value in values:
        code += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*code, _error(errno.EPERM)]


def _if_all_zero(*indices: int) -> list[_Instruction]:
    """Allow where these arguments are 0, both halves of each."""
    code: list[_Instruction] = []
    for offset in (_ARGUMENTS + 8 * index + half for index in indices for half in (0, 4)):
        code += [(_LOAD, 0, 0, offset), (_JUMP_EQUAL, 1, 0, 0), _error(errno.EPERM)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]
