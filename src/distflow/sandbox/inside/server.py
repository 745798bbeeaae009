"""The fork server: an interpreter that has imported what programs import, and forks one process for each.

It runs nothing of theirs and keeps nothing of them: code and input pass through as descriptors that it does not read.
Whoever asks holds the other end of a socket for each process, `report`: what is written to it, or its end, kills the
process, whose end is told there. The server ends with its owner, and everything with it.
"""

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

from distflow.sandbox.inside.isolation import Walls, die_with, make_walls
from distflow.sandbox.inside.libc import fork
from distflow.sandbox.inside.program import REQUEST, Request, prepare, run_program
from distflow.sandbox.inside.warmup import rehearse

MAX_MESSAGE_BYTES = 4096
DESCRIPTORS = struct.Struct("6i")
"""That of `report`, and those of a `Request`."""
ENDED, FAILED = b"e", b"f"
"""What is told begins with one of them: `END`, or why no process could be started."""
END = struct.Struct("=id")
"""Exit code, as of `subprocess`, and seconds of the processor."""
_IMPORTED = (
    *("abc", "array", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy", "ctypes", "datetime"),
    *("enum", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "os", "random", "re"),
    *("string", "struct", "sys", "textwrap", "threading", "time", "traceback", "types", "typing", "warnings"),
)
"""What programs often import. Each module makes every process larger, and longer to start and to end."""


class _Child(NamedTuple):
    pid: int
    handle: int
    report: int


def main(control_at: int, owner: int) -> None:
    """control_at: the descriptor of a socket for requests. owner: of a pidfd of the process whose server this is."""
    if os.getpid() == 1:  # in a namespace, where bubblewrap is the parent
        die_with(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what an owner ignores or blocks is no matter here
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=control_at)
    sys.path[:] = [path for path in sys.path[1:] if path.startswith(sys.base_prefix)]
    for name in _IMPORTED:
        import_module(name)
    try:
        walls = make_walls()
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        return
    prepare()
    rehearse()
    control.send(b"{}")
    gc.collect()
    gc.disable()
    gc.freeze()
    server = os.getpid()
    request, descriptors = _Server(control, owner).serve(walls)
    run_program(request, descriptors, walls, server)


class _Server:
    """What it does for each program is kept small: all that it writes to meanwhile, down to counts of references, is
    copied page by page, as the child has the same pages."""

    def __init__(self, control: socket.socket, owner: int) -> None:
        self.control = control
        self.owner = owner
        self.poll = select.poll()
        for descriptor in (control.fileno(), owner):
            self.poll.register(descriptor, select.POLLIN)
        self.by_handle: dict[int, _Child] = {}
        self.by_report: dict[int, _Child] = {}

    def serve(self, walls: Walls) -> tuple[Request, list[int]]:
        """Returns in forked children only."""
        control = self.control.fileno()
        while True:
            # In the order of registering, forks first: no number that an end frees is another's in the same round.
            for descriptor, _ in self.poll.poll():
                if descriptor in self.by_handle:
                    self._ended(self.by_handle[descriptor])
                elif descriptor in self.by_report:
                    self._kill(self.by_report[descriptor])
                elif descriptor == control:
                    asked = self._fork()
                    if asked is not None:
                        return asked
                elif descriptor == self.owner:
                    self._end()

    def _fork(self) -> tuple[Request, list[int]] | None:
        message, sent, _, _ = self.control.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(DESCRIPTORS.size))
        if not message:
            self._end()
        report, *descriptors = DESCRIPTORS.unpack(sent[0][2])
        try:
            pid = fork()
        except OSError as error:
            _tell(report, FAILED + f"no process could be started: {error}".encode())
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
        """Everything dies with this process by itself; what is waited for leaves no zombie either."""
        for child in self.by_handle.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        os._exit(0)

    def _kill(self, child: _Child) -> None:
        """Its end is told when it has come."""
        del self.by_report[child.report]
        self.poll.unregister(child.report)
        os.kill(child.pid, signal.SIGKILL)

    def _ended(self, child: _Child) -> None:
        _, status, used = os.wait4(child.pid, 0)
        if child.report in self.by_report:
            del self.by_report[child.report]
            self.poll.unregister(child.report)
        del self.by_handle[child.handle]
        self.poll.unregister(child.handle)
        os.close(child.handle)
        _tell(child.report, ENDED + END.pack(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))
        os.close(child.report)


def _tell(report: int, message: bytes) -> None:
    with suppress(OSError):  # who asked is gone
        os.write(report, message)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
