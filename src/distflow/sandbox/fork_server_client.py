"""The fork server's process, and a running program that it forked, seen from the caller's process.

The server inherits nothing of its owner's environment, and ends with its owner, by a keeper. At the
level "namespaces" bubblewrap (`bwrap`) starts it in namespaces for users, processes, network,
mounts and others. The fork server is process 1 there, and there is no /proc, since bubblewrap's own
process 1 would show its command line. Programs are not process 1, which resource limits cannot
kill.
"""

import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple, Self

import distflow
from distflow.processes.child import Child, how_it_ended
from distflow.sandbox.inside.fork_server import END, FAILED, MAX_MESSAGE_BYTES, READY
from distflow.sandbox.inside.forked_program import EXIT_OUT_OF_MEMORY, REQUEST, Request
from distflow.sandbox.inside.isolation import (
    DEVICES_READ,
    DEVICES_WRITTEN,
    PACKAGES,
    SYSTEM,
    standard_library,
)
from distflow.sandbox.inside.program_messages import HEADER, MAX_BYTES
from distflow.sandbox.interface import Broken, Cause, Limits, SandboxFault

LevelName = Literal["namespaces", "floor"]
START_TIMEOUT_S = 60.0
_BOUND_SOURCE = "/distflow-source"  # the folder of distflow's source inside the namespaces
_PACKAGE = Path(distflow.__file__).parent
_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from distflow.sandbox.inside.fork_server import main
main(int(sys.argv[2]))
"""
_OPTIONS = ("-P", "-s", "-S", "-B", "-X", "utf8")
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}
"""A fixed order of sets makes programs deterministic; LD_BIND_NOW resolves library functions once,
instead of in each program. Programs themselves have no environment."""
# When memory runs short, the kernel kills these processes first.
_SHELL = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'


_NAMESPACES = (
    "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try "
    "--as-pid-1 --uid 65534 --gid 65534 --hostname sandbox --cap-drop ALL --chdir /"
)


class ServerGone(Exception):
    """The fork server was killed, or it ended."""


class ForkServer:
    """One process, plus bubblewrap's if there are namespaces. Used by one thread at a time."""

    def __init__(self, level: LevelName) -> None:
        """Raises SandboxFault if it does not start."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        self._stderr = open(reading, "rb")  # noqa: SIM115  closed by `close`

        try:
            self._child = self._start(level, theirs.fileno(), writing)
        except (OSError, SandboxFault) as error:
            self.control.close()
            self._stderr.close()
            raise SandboxFault(str(error)) from None
        finally:
            theirs.close()
            os.close(writing)

        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._wait_until_ready()
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        """Of its keeper."""
        return self._child.pid

    def ask(self, request: Request, descriptors: list[int]) -> None:
        """Fork a process for the request; descriptors: see `server.DESCRIPTORS`. Raises
        ServerGone."""
        try:
            socket.send_fds(self.control, [REQUEST.pack(*request)], descriptors)
        except OSError as error:
            raise ServerGone(str(error)) from None

    def close(self) -> None:
        """End the server and all its programs. Idempotent."""
        self.control.close()
        self._child.end()
        self._stderr.close()

    def _start(self, level: LevelName, control: int, stderr: int) -> Child:
        source = str(_PACKAGE.parent)
        launch = list[str]()
        if level == "namespaces":
            source = _BOUND_SOURCE
            launch = _bubblewrap()

        python = os.path.realpath(sys.executable)
        launch += [python, *_OPTIONS, "-c", _CODE, source, str(control)]
        return Child(
            ["/bin/sh", "-c", _SHELL, "sh", *launch],
            _ENVIRONMENT,
            pass_fds=(control,),
            stderr=stderr,
            cwd="/",
        )

    def _wait_until_ready(self) -> None:
        self.control.settimeout(START_TIMEOUT_S)
        try:
            message = self.control.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise SandboxFault(f"it was not ready after {START_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise SandboxFault(f"it did not start: {error}") from None

        self.control.settimeout(None)
        if not message:
            status = self._child.wait(START_TIMEOUT_S)
            lines = self._stderr.read().decode(errors="replace").strip().splitlines()
            raise SandboxFault(lines[-1] if lines else f"it {how_it_ended(status)}")

        if message != READY:
            raise SandboxFault(message.decode())


def _bubblewrap() -> list[str]:
    """bubblewrap's command line, to be followed by that of the fork server. Raises SandboxFault."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxFault("bubblewrap is not installed (its program is 'bwrap')")

    words = [bwrap, *_NAMESPACES.split()]
    for path in SYSTEM:
        is_link = os.path.islink(path) and not path.startswith("/etc")
        words += (
            ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind-try", path, path]
        )

    library = standard_library()
    for path in (os.path.realpath(sys.executable), os.path.join(sys.base_prefix, "lib"), library):
        words += ["--ro-bind", path, path]

    for name in PACKAGES:
        if os.path.isdir(os.path.join(library, name)):
            words += ["--tmpfs", os.path.join(library, name)]

    for device in (*DEVICES_READ, *DEVICES_WRITTEN):
        words += ["--dev-bind-try", device, device]
    for name in ("__init__.py", "sandbox"):
        words += ["--ro-bind", str(_PACKAGE / name), f"{_BOUND_SOURCE}/distflow/{name}"]
    return [*words, "--remount-ro", "/", "--"]


_CHUNK_BYTES = 65536
_KILL_TIMEOUT_S = 30.0
_TOKEN_BYTES = 8
_SHORTEST_S = 0.001


class End(NamedTuple):
    """How a process ended."""

    exit_code: int
    """Negative for a signal, as in `subprocess`."""
    cpu_s: float


class OutputStream:
    """A program's output to one stream: its first `max_bytes`, and its size."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        self.descriptor = descriptor
        self.content = bytearray()
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def read(self) -> bool:
        """Read what has arrived. Returns False at the end, and if nothing has arrived."""
        try:
            part = os.read(self.descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False

        self.num_bytes += len(part)
        self.content += part[: self._max_bytes - len(self.content)]
        return bool(part)

    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


class Program:
    """A running program, used by one thread at a time, and closed by its creator; `close` leaves
    nothing of it."""

    def __init__(
        self, server: ForkServer, is_main: bool, code: bytes, stdin: bytes, limits: Limits
    ) -> None:
        """Starts the program. Raises ServerGone, SandboxFault."""
        self.limits = limits
        self.end: End | None = None
        self._killed_for: Cause | None = None
        self._left_s = limits.wall_s
        self._inbox = bytearray()
        self._report, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]

        if stdin:
            stdin_file = _sealed(stdin)
        else:
            stdin_file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

        theirs = [
            report.detach(),
            _sealed(code),
            stdin_file,
            pipes[0][1],
            pipes[1][1],
            answers.detach(),
        ]
        self.out, self.err = (OutputStream(ours, limits.output_bytes) for ours, _ in pipes)
        self._readers: dict[int, Callable[[], bool]] = {
            self._report.fileno(): self._read_report,
            self._answers.fileno(): self._read_answers,
            self.out.descriptor: self.out.read,
            self.err.descriptor: self.err.read,
        }
        self._poll = select.poll()
        for descriptor in self._readers:
            self._poll.register(descriptor, select.POLLIN)
        for stream in (self.out, self.err):
            os.set_blocking(stream.descriptor, False)
        token = secrets.token_bytes(_TOKEN_BYTES)
        cpu_s = max(1, -int(-limits.cpu_s // 1))
        request = Request(is_main, token, cpu_s, limits.memory_bytes, limits.open_files)

        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                server.ask(request, theirs)
            finally:
                for descriptor in theirs:
                    os.close(descriptor)

            self._token = token
            body = self._next_frame(time.monotonic() + _KILL_TIMEOUT_S)
            if body is None:
                raise SandboxFault("a process ended before it was isolated")
            if body != b"true":
                raise SandboxFault(f"a process could not be isolated: {json.loads(body)}")
            on_failure.pop_all()

    @property
    def stdout(self) -> str:
        return self.out.text()

    @property
    def stderr(self) -> str:
        return self.err.text()

    def renew_time(self) -> None:
        """Restart the allowance of `Limits.wall_s`."""
        self._left_s = self.limits.wall_s

    def question(self, body: bytes) -> bytes:
        """Send a call and return the body of its result. Raises Broken, ServerGone."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        deadline = time.monotonic() + self._left_s
        self._answers.settimeout(max(self._left_s, _SHORTEST_S))

        try:
            self._answers.sendall(HEADER.pack(self._token, len(body)) + body)
        except TimeoutError:
            self.kill("time")
        except OSError:  # the other end is closed, which reading reports
            pass

        self._answers.settimeout(None)
        self._left_s = deadline - time.monotonic()
        return self.answer()

    def answer(self) -> bytes:
        """The body of the result that is due. Raises Broken, ServerGone."""
        deadline = time.monotonic() + self._left_s
        body = self._next_frame(deadline)
        if body is None:
            raise self.broken()
        self._left_s = deadline - time.monotonic()
        return body

    def wait(self) -> End:
        """Wait until it ended or was killed at a limit. Raises ServerGone."""
        deadline = time.monotonic() + self._left_s
        while self.end is None:
            self._poll_once(deadline)
            self._inbox.clear()  # the program has no descriptor for results
        return self.end

    def cause(self) -> Cause | None:
        """Why it ended; None if it exited with status 0."""
        assert self.end is not None
        if self._killed_for:
            return self._killed_for

        if self.end.exit_code < 0:
            # the kernel's two clocks differ a little
            used_up = self.end.cpu_s > 0.9 * self.limits.cpu_s
            if used_up and self.end.exit_code == -signal.SIGKILL:
                return "time"
            return "signal"

        if self.end.exit_code == EXIT_OUT_OF_MEMORY:
            return "memory"
        return "exit" if self.end.exit_code else None

    def broken(self) -> Broken:
        """The error to raise if the program ended without a due result."""
        assert self.end is not None
        code = self.end.exit_code
        cause = self.cause() or "exit"
        limits = self.limits
        reasons: dict[Cause, str] = {
            "time": (
                f"it ran out of time ({limits.cpu_s:g} s of the processor, {limits.wall_s:g} s by "
                "the clock)"
            ),
            "memory": f"it ran out of memory ({limits.memory_bytes / 2**20:,.0f} MiB)",
            "output": f"it printed more than {limits.printed_bytes:,} bytes",
            "signal": f"it was ended by signal {-code}",
            "exit": f"it ended with exit status {code} and no answer",
            "frame": "it wrote invalid data to the descriptor for results",
        }

        return Broken(cause, reasons[cause])

    def close(self) -> None:
        """Kill it if it is alive, and wait for its end. Idempotent."""
        if not self._readers:
            return

        with suppress(ServerGone):  # its processes ended with it
            self.kill(None)
            self._report.settimeout(_KILL_TIMEOUT_S)
            with suppress(OSError):
                self._report.recv(1)  # until the server has released everything of the process

        self._readers.clear()
        self._report.close()
        self._answers.close()
        for stream in (self.out, self.err):
            os.close(stream.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self, cause: Cause | None) -> None:
        """Kill it at once and wait for its end; cause: the reason. Raises ServerGone."""
        if self.end is not None:
            return

        self._killed_for = cause
        with suppress(OSError):  # the server is gone, which reading reports
            self._report.shutdown(socket.SHUT_WR)
        self._report.settimeout(_KILL_TIMEOUT_S)
        self._read_report()

    def _next_frame(self, deadline: float) -> bytes | None:
        """The body of the frame that is due; None if the program ended without it."""
        while (body := self._take_frame()) is None and self.end is None:
            self._poll_once(deadline)
        return body

    def _take_frame(self) -> bytes | None:
        """The body of a completely received frame. Kills the program if it is not the frame that is
        due."""
        if len(self._inbox) < HEADER.size:
            return None

        token, size = HEADER.unpack_from(self._inbox)
        if token != self._token or size > MAX_BYTES:
            self.kill("frame")
            return None
        if len(self._inbox) < HEADER.size + size:
            return None

        body = bytes(self._inbox[HEADER.size : HEADER.size + size])
        del self._inbox[: HEADER.size + size]
        return body

    def _poll_once(self, deadline: float) -> None:
        """Wait for data until the deadline and read it; kill the program if it exceeded a limit.
        Data that has arrived counts even after the deadline: this process may have been stopped or
        starved."""
        left_s = deadline - time.monotonic()
        for descriptor, event in self._poll.poll(max(left_s * 1000 + 1, 0)):
            if not self._readers[descriptor]() and event & select.POLLHUP:
                self._poll.unregister(descriptor)

        if max(self.out.num_bytes, self.err.num_bytes) > self.limits.printed_bytes:
            self.kill("output")
        if left_s <= 0:
            self.kill("time")
        if len(self._inbox) > HEADER.size + MAX_BYTES + _CHUNK_BYTES:
            self.kill("frame")

    def _read_answers(self) -> bool:
        try:
            part = self._answers.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return False
        self._inbox += part
        return bool(part)

    def _read_report(self) -> bool:
        try:
            message = self._report.recv(_CHUNK_BYTES)
        except TimeoutError:
            raise ServerGone("the fork server does not reply") from None

        if not message:
            self._readers.pop(self._report.fileno(), None)
            raise ServerGone("the fork server ended")
        if message.startswith(FAILED):
            raise SandboxFault(message[1:].decode())

        self.end = End(*END.unpack(message[1:]))
        for read in (self.out.read, self.err.read, self._read_answers):  # the rest of its output
            while read():
                pass

        return False


def _sealed(content: bytes) -> int:
    """A descriptor of a read-only memory file."""
    descriptor = os.memfd_create("", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(content)
    while rest:
        rest = rest[os.pwrite(descriptor, rest, len(content) - len(rest)) :]
    fcntl.fcntl(
        descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    )

    return descriptor
