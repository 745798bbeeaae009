"""User code of an episode (tools and environments) in a separate process.

A server process imports the user's modules once and forks a process for each episode, which takes
milliseconds. Whatever such a process does (hang, die, fill its memory, start others, signal its
parent) ends with the episode. The processes, each the parent of the next, and what happens if one
is killed:

- the keeper (`processes/keeper.py`), the server, or both: what is left of the three kinds ends all
  the rest, and `ProcessServer` starts both anew. Episodes that were under way raise `ServerLost`;
  their groups are issued again;
- an episode's minder, which waits for the episode's process and kills what that leaves: the episode
  fails;
- the episode's own process, which runs the user's code: likewise.

A message is `[method, arguments]`, answered by `{"value": ...}`, `{"error": ...}` or, by the minder
or the server, `{"died": ...}`.
"""

import asyncio
import hashlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from tempfile import TemporaryFile
from typing import Any, NoReturn, cast

from distflow.data import global_random_states
from distflow.errors import UserError, describe_fault
from distflow.import_target import load
from distflow.processes.channel import Channel, PeerGone, encode, framed, receive
from distflow.processes.child import Child, how_it_ended
from distflow.processes.interpreters import environment, python_command
from distflow.processes.keeper import (
    adopt_orphans,
    children,
    die_with_parent,
    end_children,
    wait_and_end,
)
from distflow.user_values import plain_value

_MAX_ANSWER_BYTES = 4 * 2**20
MEMORY_BYTES = 4 * 2**30
START_TIMEOUT_S = 60.0
_MOST_DEATHS = 4
"""Of a server, without an answer from an episode's process in between."""
_ENDS_WITHIN_S = 10.0


class MadeByOptions:
    """A workflow that is pickled as its options: in another process it is made anew, with processes
    of its own."""

    _options: Mapping[str, Any]

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self._options), ()


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the `locals()` of a constructor."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__")}


class CallFailed(Exception):
    """The user's code raised an error."""


class ProcessEnded(CallFailed):
    """The process died, or was killed because it did not answer in time; it cannot be called any
    more."""


class ServerLost(RuntimeError):
    """The server, or its keeper, was killed while the episode ran: no fault of the episode."""


class ServerGivenUp(UserError):
    """The server is killed again and again, so the run ends."""


class ProcessServer:
    """Forks processes that each have the object `target(**options)`, which is created once, in the
    server. A server that was killed is started anew.

    pid: of the server.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        """options: plain values. Raises UserError if the object cannot be created."""
        self._given = json.dumps([target, dict(options)]).encode()
        self._starting = threading.Lock()
        self._is_closed = False
        self._deaths_in_a_row = 0
        self._start()

    async def fork(self, *identity: object) -> "UserProcess":
        """identity: seeds the process's random generators. Raises ServerLost, ServerGivenUp,
        UserError."""
        seed = hashlib.blake2b(repr(identity).encode("utf-8", "surrogatepass")).digest()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                if self._child.status() is not None:
                    await asyncio.to_thread(self._replace, self._child)
                socket.send_fds(self._control, [seed], [theirs.fileno()])
            except OSError:  # it has just ended
                ours.close()
                raise await self.lost() from None
            except BaseException:
                ours.close()
                raise

        return UserProcess(*await asyncio.open_connection(sock=ours), self)

    def answered(self) -> None:
        """Note that an episode's process works."""
        self._deaths_in_a_row = 0

    async def lost(self) -> ServerLost:
        """The error of an episode whose process ended with the server."""
        await asyncio.to_thread(self._child.wait, _ENDS_WITHIN_S)
        return ServerLost(self._how_lost())

    def close(self) -> None:
        """End all of its processes. Idempotent."""
        self._is_closed = True
        self._control.close()
        self._child.end()

    def _start(self) -> None:
        """Raises UserError if the object cannot be created."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        # unlike an argument, it may be long, and no other user can read it
        with theirs, TemporaryFile() as given:
            given.write(self._given)
            given.seek(0)
            self._child = Child(
                python_command(__name__, theirs.fileno()),
                environment(OMP_NUM_THREADS="1"),
                pass_fds=(theirs.fileno(),),
                stdin=given,
                memory_bytes=MEMORY_BYTES,
                continued=True,
            )

        self._control.settimeout(START_TIMEOUT_S)
        try:
            answer = json.loads(self._control.recv(2**16) or b"{}")
        except TimeoutError:
            answer = {"error": f"its modules were not imported within {START_TIMEOUT_S:g} s"}
        except ConnectionError:
            answer = {}

        if "value" not in answer:
            self.close()
            raise UserError(
                answer.get("error") or "its modules ended the process that imported them"
            )

        self.pid = int(answer["value"])

    def _replace(self, ended: Child) -> None:
        """Start another server, unless another thread has done so. Raises ServerLost,
        ServerGivenUp, UserError."""
        with self._starting:
            if self._is_closed:
                raise ServerLost("the run was closing the processes of episodes")
            if self._child is not ended:
                return

            self._deaths_in_a_row += 1
            if self._deaths_in_a_row > _MOST_DEATHS:
                raise ServerGivenUp(
                    f"{self._how_lost()}; that was time {self._deaths_in_a_row} in a row"
                )

            self._control.close()
            self._start()

    def _how_lost(self) -> str:
        ending = how_it_ended(self._child.status())
        return (
            f"the process that starts those of agents, tools and environments {ending}. {_ADVICE}"
        )


_ADVICE = (
    "If memory ran out (dmesg shows it), run fewer episodes at once "
    "(async.max_concurrent_rollouts, data.train_batch_size) or let each use less; an agent, tool "
    "or environment must not signal processes that it did not start"
)


class UserProcess:
    """The process of one episode, which runs one call at a time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: ProcessServer,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._server = server

    async def call(self, method: str, timeout_s: float | None, **arguments: Any) -> Any:
        """The result of the object's method. Raises CallFailed, ProcessEnded, ServerLost."""
        self._writer.write(encode([method, arguments]))

        # notices an answer that arrives while our task has to wait
        reading = asyncio.ensure_future(self._answer())
        try:
            await asyncio.wait((reading,), timeout=timeout_s)
            if reading.done():
                answer = reading.result()
            else:
                answer = {"died": f"no answer within {timeout_s:g} s"}
        except ValueError as error:
            answer = {"died": f"its answer cannot be read: {error}"}
        except PeerGone:
            self.close()
            raise await self._server.lost() from None
        finally:
            reading.cancel()  # no effect if it is done

        self._server.answered()
        if "died" in answer:
            self.close()
            raise ProcessEnded(str(answer["died"]))
        if "error" in answer:
            raise CallFailed(str(answer["error"]))

        return answer["value"]

    def close(self) -> None:
        """End the process and everything that it started. Idempotent."""
        if not self._writer.is_closing():
            with suppress(OSError):  # the other end is closed
                # whoever else inherited it
                self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._writer.transport.abort()

    async def _answer(self) -> dict[str, Any]:
        """The next answer. Raises PeerGone if server and process are gone, ValueError."""
        answer = await receive(self._reader)
        if not isinstance(answer, dict) or not {"value", "error", "died"} & {*answer}:
            raise ValueError("it is no answer")
        return answer


def main() -> None:
    """The server: make the object, then fork a process for each request, until its keeper ends
    it."""
    keeper = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)

    target, options = json.load(sys.stdin)
    try:
        hosted = cast(Callable[..., Any], load(target))(**options)
    except UserError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return

    watched = os.pidfd_open(keeper)
    die_with_parent(keeper, 0)  # from now on the server itself ends what it started
    adopt_orphans()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    control.send(json.dumps({"value": os.getpid()}).encode())

    try:
        _serve(control, watched, partial(_mind, hosted, mask))
    finally:
        end_children()


_Minder = tuple[socket.socket, int]
"""Our end of its socket, and a pidfd."""


def _serve(
    control: socket.socket, keeper: int, mind: Callable[[int, socket.socket, bytes], NoReturn]
) -> None:
    """Fork minders, and end those whose other end is closed or which have ended. Returns when the
    keeper has ended."""
    running: dict[int, _Minder] = {}  # by pid
    own = children()  # processes started by the user's modules, which all episodes use

    while True:
        ready = _wait(control, keeper, running.values())
        if keeper in ready:
            return

        for pid, (channel, handle) in list(running.items()):
            if channel.fileno() in ready or handle in ready:
                del running[pid]
                _end(pid, channel, handle)
                end_children({*running, *own})

        if control.fileno() not in ready:
            continue

        seed, descriptors, *_ = socket.recv_fds(control, 2**10, 1)
        if not descriptors:
            return

        channel = socket.socket(fileno=descriptors[0])
        server = os.pidfd_open(os.getpid())

        pid = os.fork()
        if pid == 0:
            for other, handle in running.values():  # else nobody would see that they are closed
                other.close()
                os.close(handle)
            control.close()
            os.close(keeper)
            mind(server, channel, seed)

        os.close(server)
        running[pid] = (channel, os.pidfd_open(pid))


def _wait(control: socket.socket, keeper: int, minders: Iterable[_Minder]) -> set[int]:
    """The descriptors on which something has happened: a request, an end, or a closed socket."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(keeper, select.POLLIN)
    for channel, handle in minders:
        poll.register(channel, 0)  # reports that our end is closed
        poll.register(handle, select.POLLIN)

    return {descriptor for descriptor, _ in poll.poll()}


def _end(minder: int, channel: socket.socket, handle: int) -> None:
    """Kill the minder, with which its episode's process ends, and report it if that is how it
    ended."""
    with suppress(ProcessLookupError):
        os.kill(minder, signal.SIGKILL)
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(minder, 0)[1])

    with channel:
        if status:  # else the minder has reported
            _report(channel, status)


def _report(channel: socket.socket, status: int) -> None:
    """Tell whoever still listens how an episode's process ended."""
    with suppress(OSError):
        channel.setblocking(False)
        channel.send(encode({"died": f"its process {how_it_ended(status)}"}))


def _mind(
    hosted: object,
    mask: set[int | signal.Signals],
    server: int,
    channel: socket.socket,
    seed: bytes,
) -> NoReturn:
    """The minder of an episode: fork its process, wait for that, and end what it leaves; at the
    latest when the server has ended. mask: of the process's signals. server: a descriptor of the
    server."""
    adopt_orphans()
    minder = os.getpid()

    if (process := os.fork()) == 0:
        die_with_parent(minder)
        os.close(server)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _run(channel, hosted, seed)

    status = wait_and_end(process, (server,), continued=False)
    if not select.select([server], [], [], 0)[0]:
        _report(channel, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(channel: socket.socket, hosted: object, seed: bytes) -> NoReturn:
    """The process of an episode: answer calls until it is killed."""
    os.setsid()
    global_random_states.seed(seed)
    own = os.getpid()
    calls = Channel(channel)

    with suppress(PeerGone):
        while True:
            method, arguments = calls.receive()
            answer = _answer(getattr(hosted, method), arguments)
            if os.getpid() != own:  # the user's code forked and returned twice
                break
            calls.send(answer)

    os._exit(0)


def _answer(function: Callable[..., object], arguments: dict[str, Any]) -> bytes:
    try:
        text = json.dumps({"value": function(**arguments)}, allow_nan=False, default=_as_plain)
    except MemoryError:
        return encode({"died": "it ran out of memory"})
    except BaseException as error:  # the user's code may raise anything
        return encode({"error": describe_fault(error)})

    if len(text) >= _MAX_ANSWER_BYTES:
        return encode({"error": f"an answer of {len(text):,} bytes; at most {_MAX_ANSWER_BYTES:,}"})
    return framed(text.encode())


def _as_plain(value: object) -> object:
    """Raises TypeError for what is no JSON value and has no plain form."""
    if (found := plain_value(value)) is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return found
