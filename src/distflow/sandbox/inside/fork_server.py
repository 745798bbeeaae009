"""The fork server: an interpreter that has imported common modules, and forks one process for each
program.

It runs no program itself and keeps nothing of them: code and input pass through as descriptors,
unread. For each process the caller holds the other end of a socket, `report`. Anything written to
it, or closing it, kills the process, and the server reports its end there. The server ends when its
owner closes the socket for requests, or ends, and all programs with it.
"""

import gc
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
    REQUEST,
    Request,
    prepare,
    run_program,
)
from distflow.sandbox.inside.isolation import die_with, fork, prepare_isolation

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
    control.send(READY)
    gc.collect()
    gc.disable()
    gc.freeze()
    server = os.getpid()
    request, descriptors = _Server(control).serve()
    run_program(request, descriptors, isolation, server)


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
