"""The fork server: an interpreter that has imported common modules, and forks one process for each
program.

It runs no program itself and keeps nothing of them: code and input pass through as descriptors,
unread. For each process the caller holds the other end of a socket, `report`. Anything written to
it, or closing it, kills the process, and the server reports its end there. The server ends when its
owner closes the socket for requests, or ends, and all programs with it.
"""

import gc
import linecache
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

from distflow.sandbox.inside.forked_program import (
    FILE,
    REQUEST,
    Request,
    prepare,
    run_program,
    serve_calls,
)
from distflow.sandbox.inside.isolation import die_with, fork, prepare_isolation
from distflow.sandbox.inside.program_messages import read_frame, to_text, write_frame

MAX_MESSAGE_BYTES = 4096
DESCRIPTORS = struct.Struct("6i")
"""`report`, followed by the descriptors of a `Request`."""
READY = b"ready"
"""The first message to the owner; any other is the reason why no program can be isolated."""
ENDED = b"e"
FAILED = b"f"
"""The first byte of a report; then comes `END`, or the reason why no process could be started."""
END = struct.Struct("=id")
"""Exit code, as in `subprocess`, and CPU seconds."""
_IMPORTED = (
    "abc",
    "array",
    "bisect",
    "cmath",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "ctypes",
    "datetime",
    "enum",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "os",
    "random",
    "re",
    "string",
    "struct",
    "sys",
    "textwrap",
    "threading",
    "time",
    "traceback",
    "types",
    "typing",
    "warnings",
)
"""Modules that programs often import. Each makes every process larger, and slower to start and to
end."""

_WARM_UP_ROUNDS = 20
_WARM_UP_CALLS = 3
_WARM_UP_TOKEN = b"warm-up!"
# Trusted code: it runs without isolation.
_WARM_UP_PROGRAM = b"""
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import *


def add(a, b, *rest):
    counts, found = defaultdict(int), [each ** 2 for each in range(3) if each]
    for i, each in enumerate(found):
        if each > 2 and a:
            counts[str(each)] += i
        elif not each:
            found.append(math.gcd(each, 2))
        else:
            while len(found) < 2:
                found += [a]
    text = f"{a} {sorted(counts)} {sum(map(int, '1 2'.split())):.2f}"
    try:
        return {"sum": (a + b, text), "rest": [*found[:1], {1.5, None}]}
    except TypeError as error:
        raise ValueError(str(error)) from None


class Solution:
    def __init__(self, start: int = 3) -> None:
        self.start = start

    def times(self):
        return lambda number: number * self.start
"""


class _Child(NamedTuple):
    pid: int
    handle: int
    report: int


def main(control_at: int) -> None:
    """control_at: the descriptor of a socket for requests."""
    if os.getpid() == 1:  # in a namespace, where bubblewrap is the parent
        die_with(0)
    # signals that the owner ignores or blocks are inherited
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=control_at)
    sys.path[:] = [path for path in sys.path[1:] if path.startswith(sys.base_prefix)]
    for name in _IMPORTED:
        import_module(name)
    try:
        isolation = prepare_isolation()
    except OSError as error:
        control.send(str(error).encode())
        return
    prepare()
    _warm_up()
    control.send(READY)
    gc.collect()
    gc.disable()
    gc.freeze()
    server = os.getpid()
    request, descriptors = _Server(control).serve()
    run_program(request, descriptors, isolation, server)


def _warm_up() -> None:
    """Serve calls of a program several times, leaving nothing that a later program could find.

    The interpreter fills caches and specializes code as it runs. In a forked child that work would
    be lost, and each page that it writes to would have to be copied.
    """
    question = to_text(["add", [1, 2.5, "a", [[1], (2,)]], {}]).encode()
    for _ in range(_WARM_UP_ROUNDS):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for _ in range(_WARM_UP_CALLS):
                write_frame(ours.fileno(), _WARM_UP_TOKEN, question)
            ours.shutdown(socket.SHUT_WR)
            serve_calls(_WARM_UP_PROGRAM, _WARM_UP_TOKEN, theirs.fileno())
            for _ in range(1 + _WARM_UP_CALLS):
                read_frame(ours.fileno())
    del sys.modules["program"]
    linecache.cache.pop(FILE)


class _Server:
    """Does little for each program: every page that it writes to, even just a reference count, is
    copied while a child shares it."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.poll = select.poll()
        self.poll.register(control.fileno(), select.POLLIN)
        self.by_handle: dict[int, _Child] = {}
        self.by_report: dict[int, _Child] = {}

    def serve(self) -> tuple[Request, list[int]]:
        """Serve requests; returns only in forked children."""
        control = self.control.fileno()
        while True:
            # In order of registration, forks first: no descriptor freed in a round is reused in it.
            for descriptor, _ in self.poll.poll():
                if descriptor in self.by_handle:
                    self._report_end(self.by_handle[descriptor])
                elif descriptor in self.by_report:
                    self._kill(self.by_report[descriptor])
                elif descriptor == control:
                    request = self._fork()
                    if request is not None:
                        return request

    def _fork(self) -> tuple[Request, list[int]] | None:
        message, sent, _, _ = self.control.recvmsg(
            MAX_MESSAGE_BYTES, socket.CMSG_SPACE(DESCRIPTORS.size)
        )
        if not message:
            self._end()
        report, *descriptors = DESCRIPTORS.unpack(sent[0][2])
        try:
            pid = fork()
        except OSError as error:
            _send(report, FAILED + f"no process could be started: {error}".encode())
            _close([report, *descriptors])
            return None
        if pid == 0:
            return Request(*REQUEST.unpack(message)), descriptors
        _close(descriptors)
        child = _Child(pid, os.pidfd_open(pid), report)
        self.by_handle[child.handle] = self.by_report[report] = child
        self.poll.register(child.handle, select.POLLIN)
        self.poll.register(report, select.POLLIN)
        return None

    def _end(self) -> NoReturn:
        """All programs die with this process anyway; waiting for them leaves no zombies."""
        for child in self.by_handle.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        os._exit(0)

    def _kill(self, child: _Child) -> None:
        """Kill a child; `_report_end` follows when it has ended."""
        del self.by_report[child.report]
        self.poll.unregister(child.report)
        os.kill(child.pid, signal.SIGKILL)

    def _report_end(self, child: _Child) -> None:
        _, status, used = os.wait4(child.pid, 0)
        if child.report in self.by_report:
            del self.by_report[child.report]
            self.poll.unregister(child.report)
        del self.by_handle[child.handle]
        self.poll.unregister(child.handle)
        os.close(child.handle)
        _send(
            child.report,
            ENDED + END.pack(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime),
        )
        os.close(child.report)


def _send(report: int, message: bytes) -> None:
    with suppress(OSError):  # the caller is gone
        os.write(report, message)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
