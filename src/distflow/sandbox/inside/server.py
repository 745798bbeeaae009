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
import sys
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

from distflow.sandbox.inside.program import Request, prepare, run_program
from distflow.sandbox.inside.walls import Walls, die_with, make_walls

NUM_DESCRIPTORS = 6
MAX_REQUEST_BYTES = 4096
_IMPORTED = (
    *("abc", "argparse", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc"),
    *("contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "numbers", "operator", "os"),
    *("pprint", "queue", "random", "re", "statistics", "string", "struct", "sys", "textwrap", "threading", "time"),
    *("traceback", "types", "typing", "unicodedata", "uuid", "warnings", "zlib"),
)


class _Child(NamedTuple):
    pid: int
    handle: int
    report: socket.socket


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
    control.send(b"{}")
    gc.collect()
    gc.disable()
    gc.freeze()
    server = os.getpid()
    request, descriptors = _Server(control, owner).serve(walls)
    run_program(request, descriptors, walls, server)


class _Server:
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
        while True:
            # In the order of registering, forks first: no number that an end frees is another's in the same round.
            for descriptor, _ in self.poll.poll():
                if descriptor == self.owner:
                    self._end()
                if descriptor == self.control.fileno():
                    asked = self._fork()
                    if asked is not None:
                        return asked
                elif descriptor in self.by_handle:
                    self._ended(self.by_handle[descriptor])
                elif descriptor in self.by_report:
                    self._kill(self.by_report[descriptor])

    def _fork(self) -> tuple[Request, list[int]] | None:
        message, descriptors, _, _ = socket.recv_fds(self.control, MAX_REQUEST_BYTES, NUM_DESCRIPTORS)
        if not message:
            self._end()
        request = Request(*json.loads(message))
        report = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            report.send(json.dumps({"failed": f"no process could be started: {error}"}).encode())
            report.close()
            _close(descriptors[1:])
            return None
        if pid == 0:
            report.detach()
            return request, descriptors[1:]
        _close(descriptors[1:])
        child = _Child(pid, os.pidfd_open(pid), report)
        for table, descriptor in ((self.by_handle, child.handle), (self.by_report, report.fileno())):
            table[descriptor] = child
            self.poll.register(descriptor, select.POLLIN)
        return None

    def _end(self) -> NoReturn:
        """Everything dies with this process by itself; what is waited for leaves no zombie either."""
        for child in self.by_handle.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        os._exit(0)

    def _kill(self, child: _Child) -> None:
        """Its end is told when it has come."""
        del self.by_report[child.report.fileno()]
        self.poll.unregister(child.report.fileno())
        os.kill(child.pid, signal.SIGKILL)

    def _ended(self, child: _Child) -> None:
        _, status, used = os.wait4(child.pid, 0)
        told = {"exit_code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
        if child.report.fileno() in self.by_report:
            del self.by_report[child.report.fileno()]
            self.poll.unregister(child.report.fileno())
        del self.by_handle[child.handle]
        self.poll.unregister(child.handle)
        os.close(child.handle)
        with suppress(OSError):  # who asked is gone
            child.report.send(json.dumps(told).encode())
        child.report.close()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
