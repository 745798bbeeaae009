"""User code of an episode (tools and environments) in a separate process.

A server process imports the user's modules once and forks a process for each episode, which takes milliseconds.
Whatever such a process does (hang, die, fill its memory, start others) ends with the episode: the server kills it and
everything that it started once our end of its socket is closed, or the run has ended in any way.

Messages are lines of JSON: `[method, arguments]`, answered by `{"value": ...}`, `{"error": ...}` or, by the server,
`{"died": ...}`.
"""

import asyncio
import ctypes
import hashlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn, cast

from distflow.data import global_random_states
from distflow.data.sample import note_event
from distflow.errors import UserError, users_place
from distflow.import_target import load
from distflow.user_values import plain_value

MAX_MESSAGE_BYTES = 4 * 2**20
MEMORY_BYTES = 4 * 2**30
START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHOWN = 1000
_GONE = b'{"died": "the process that started it ended"}'


class MadeByOptions:
    """A workflow that is pickled as its options: in another process it is made anew, with processes of its own."""

    _options: Mapping[str, Any]

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self._options), ()


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the `locals()` of a constructor."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__")}


class CallFailed(Exception):
    """The user's code raised an error."""


class ProcessEnded(CallFailed):
    """The process died, or was killed because it did not answer in time; it cannot be called any more."""


class ProcessServer:
    """Forks processes that each have the object `target(**options)`, which is created once, in the server."""

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        """options: plain values. Raises UserError if the object cannot be created."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs, TemporaryFile() as given:  # unlike an argument, it may be long, and no other user can read it
            given.write(json.dumps([target, dict(options)]).encode())
            given.seek(0)
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches only the run
            )
        self.pid = self._popen.pid
        self._control.settimeout(START_TIMEOUT_S)
        try:
            answer = json.loads(self._control.recv(2**16) or _GONE)
        except TimeoutError:
            answer = {"error": f"its modules were not imported within {START_TIMEOUT_S:g} s"}
        if "value" not in answer:
            self.close()
            raise UserError(answer.get("error") or "its modules ended the process that imported them")

    async def fork(self, *identity: object) -> "UserProcess":
        """identity: seeds the process's random generators. Raises RuntimeError if the server is gone."""
        seed = hashlib.blake2b(repr(identity).encode("utf-8", "surrogatepass")).digest()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [seed], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RuntimeError(f"the server of processes for tools and environments is gone ({error})") from None
        return UserProcess(*await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES))

    def close(self) -> None:
        """End all of its processes. Idempotent."""
        self._control.close()
        try:
            self._popen.wait(5)
        except subprocess.TimeoutExpired:  # the server is still importing user modules
            self._popen.kill()
            self._popen.wait()


class UserProcess:
    """The process of one episode, which runs one call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def call(self, method: str, timeout_s: float | None, **arguments: Any) -> Any:
        """The result of the object's method. Raises CallFailed or ProcessEnded."""
        self.send(method, arguments)
        return await self.answer(method, arguments, timeout_s)

    def send(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Begin a call. It is executed after those before, whose answers come first."""
        self._writer.write(json.dumps([method, arguments]).encode() + b"\n")

    async def answer(self, method: str, arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
        """The result of the first call without one. Raises as `call`."""
        reading = asyncio.ensure_future(self._answer())  # notices an answer that arrives while our task has to wait
        try:
            await asyncio.wait((reading,), timeout=timeout_s)
            answer = reading.result() if reading.done() else {"died": f"no answer within {timeout_s:g} s"}
        except (ValueError, OSError) as error:
            answer = {"died": f"its answer cannot be read: {error}"}
        finally:
            reading.cancel()  # no effect if it is done
        if "died" in answer:
            self.close()
            raise ProcessEnded(str(answer["died"]))
        if "error" in answer:
            raise CallFailed(str(answer["error"]))
        note_event("called", method, arguments, answer["value"])
        return answer["value"]

    def close(self) -> None:
        """End the process and everything that it started. Idempotent."""
        if not self._writer.is_closing():
            with suppress(OSError):  # the other end is closed
                self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # whoever else inherited it
            self._writer.transport.abort()

    async def _answer(self) -> dict[str, Any]:
        """The next answer. Raises ValueError, OSError."""
        line = b"\n"
        while line == b"\n":
            line = await self._reader.readline()
        answer = json.loads(line or _GONE)
        if not isinstance(answer, dict) or not {"value", "error", "died"} & {*answer}:
            raise ValueError("it is no answer")
        return answer


def main() -> None:
    """The server: make the object, then fork a process for each request, until the run ends."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _die_with(signal.SIGKILL)  # during imports; later `_serve` watches, since the starting thread may end earlier
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    target, options = json.load(sys.stdin)
    try:
        hosted = cast(Callable[..., Any], load(target))(**options)
    except UserError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    parent = os.pidfd_open(parent_pid)
    _die_with(0)
    _adopt_orphans()
    if os.getppid() == parent_pid:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        control.send(b'{"value": true}')
        _serve(control, parent, hosted)


def _serve(control: socket.socket, parent: int, hosted: object) -> None:
    """Fork processes, and end those whose other end is closed or which have ended. Returns when the run has ended."""
    running: dict[int, tuple[socket.socket, int]] = {}  # by pid: its end of the socket, and a pidfd
    own = _children()  # processes started by the user's modules, which all episodes use
    while True:
        poll = select.poll()
        for watched in (control.fileno(), parent, *(handle for _, handle in running.values())):
            poll.register(watched, select.POLLIN)
        for channel, _ in running.values():
            poll.register(channel, 0)  # reports that our end is closed
        ready = {descriptor for descriptor, _ in poll.poll()}
        for pid in [pid for pid, (channel, handle) in running.items() if {channel.fileno(), handle} & ready]:
            _end(pid, *running.pop(pid))
            _end_orphans({*running, *own})
        seed, descriptors, *_ = socket.recv_fds(control, 2**10, 1) if control.fileno() in ready else (b"", [])
        if parent in ready or (control.fileno() in ready and not descriptors):
            for pid, (channel, handle) in running.items():
                _end(pid, channel, handle)
            _end_orphans(())
            return
        if descriptors:
            channel = socket.socket(fileno=descriptors[0])
            if (pid := os.fork()) == 0:
                for other, handle in running.values():  # else nobody would see that they are closed
                    other.close()
                    os.close(handle)
                control.close()
                _run(channel, hosted, seed)
            running[pid] = channel, os.pidfd_open(pid)


def _end(pid: int, channel: socket.socket, handle: int) -> None:
    """Kill the process and those that it started, and report why it ended to whoever still listens."""
    for kill in (os.killpg, os.kill):  # it may not have its process group yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.close(handle)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    with channel, suppress(OSError):
        channel.setblocking(False)
        channel.send(b"\n" + json.dumps({"died": f"its process {how}"}).encode() + b"\n")


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _end_orphans(kept: Collection[int]) -> None:
    """Kill processes that an episode started in other sessions: they became ours when the episode's process died."""
    while left := _children().difference(kept):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run(channel: socket.socket, hosted: object, seed: bytes) -> NoReturn:
    """The process of an episode: answer calls until it is killed."""
    _die_with(signal.SIGKILL)
    _adopt_orphans()
    os.setsid()
    global_random_states.seed(seed)
    own = os.getpid()
    with channel.makefile("rb") as calls:
        for line in calls:
            method, arguments = json.loads(line)
            answer = _answer(getattr(hosted, method), arguments)
            if os.getpid() != own:  # the user's code forked and returned twice
                os._exit(0)
            channel.sendall(answer + b"\n")
    os._exit(0)


def _answer(function: Callable[..., object], arguments: dict[str, Any]) -> bytes:
    try:
        text = json.dumps({"value": function(**arguments)}, allow_nan=False, default=_as_plain)
    except MemoryError:
        return b'{"died": "it ran out of memory"}'
    except BaseException as error:  # the user's code may raise anything
        place = f" (at {found})" if (found := users_place(error)) else ""
        text = json.dumps({"error": f"{type(error).__name__}: {error}"[:_SHOWN] + place})
    if len(text) >= MAX_MESSAGE_BYTES:
        text = json.dumps({"error": f"an answer of {len(text):,} bytes; at most {MAX_MESSAGE_BYTES:,}"})
    return text.encode()


def _as_plain(value: object) -> object:
    """Raises TypeError for what is no JSON value and has no plain form."""
    if (found := plain_value(value)) is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return found


def _die_with(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def _adopt_orphans() -> None:
    """Make descendants of this process its children when their parents end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    main()
