"""The filter of system calls, run here as the kernel would run it, against the list that it is made
of."""

import errno
import struct

import pytest

from distflow.sandbox.inside.isolation import (
    ALLOWED,
    ARCHITECTURES,
    CLONE3,
    FCNTL,
    FCNTL_COMMANDS,
    IOCTL,
    IOCTL_REQUESTS,
    PRLIMIT64,
    make_filter,
)

ALLOW = 0x7FFF0000
KILL = 0x80000000
FAIL = 0x00050000
REFUSED = FAIL | errno.EPERM


def answer(filter_: bytes, number: int, architecture: int, arguments: tuple[int, ...] = ()) -> int:
    """Of `struct seccomp_data`: the number, the architecture, the address of the call, six
    arguments."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    at = 0
    accumulator = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", filter_, 8 * at)
        at += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x15:
            at += if_true if accumulator == value else if_false
        elif code == 0x35:
            at += if_true if accumulator >= value else if_false
        else:
            assert code == 0x06, code
            return int(value)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_each_number_has_the_answer_of_the_list(machine):
    filter_ = make_filter(machine)
    here = ARCHITECTURES[machine]
    allowed = set(ALLOWED[machine].values())
    special = {
        FCNTL[machine]: REFUSED,
        IOCTL[machine]: REFUSED,
        CLONE3[machine]: FAIL | errno.ENOSYS,
    }

    for number in [*range(2000), *range(2**30 - 50, 2**30), 2**29]:
        wanted = ALLOW if number in allowed else special.get(number, REFUSED)
        # Arguments that no list has, and that change nothing for a call which is allowed whatever
        # they are.
        assert answer(filter_, number, here, (7, 77, 7)) == wanted, number

    for number in [2**30, 2**30 + 1, 2**30 + 59, 2**31, 2**32 - 1]:
        assert answer(filter_, number, here) == KILL
    others = set(ARCHITECTURES.values()) - {here} | {0x40000003, 0x40000028}
    assert {answer(filter_, number, other) for number in range(500) for other in others} == {KILL}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide_where_they_must(machine):
    filter_ = make_filter(machine)
    here = ARCHITECTURES[machine]

    for number, known in ((FCNTL[machine], FCNTL_COMMANDS), (IOCTL[machine], IOCTL_REQUESTS)):
        for value in [*range(2000), *known, 0x5412, 2**32 - 1]:
            wanted = ALLOW if value in known else REFUSED
            assert answer(filter_, number, here, (1, value, 3)) == wanted
            # the kernel reads the lower half
            assert answer(filter_, number, here, (1, value + 2**32, 3)) == wanted

    for first, new in ((0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32)):
        wanted = REFUSED if first or new else ALLOW
        assert answer(filter_, PRLIMIT64[machine], here, (first, 7, new, 7)) == wanted
