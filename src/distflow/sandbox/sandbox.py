"""The sandbox: runs programs that nobody trusts, each in a fresh process behind walls, of which nothing is left."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any, Self, cast

from distflow.sandbox.fork_server import ForkServer, LevelName, ServerGone
from distflow.sandbox.inside.values import from_text, to_text
from distflow.sandbox.interface import Ran, Status
from distflow.sandbox.isolation_level import start_server
from distflow.sandbox.limits import DEFAULT_LIMITS, Broken, Limits, Raised, SandboxFault
from distflow.sandbox.running_program import Program

_VALUE = b'{"value": '
_SHOWN_TEXT = 2000


class Session:
    """A process that has executed a program as a module, and answers calls of its functions.

    Used by one thread at a time; a context manager, after which nothing is left of the process.
    """

    def __init__(self, program: Program) -> None:
        self._program = program

    def call(self, name: str, args: Sequence[object] = (), kwargs: Mapping[str, object] = MappingProxyType({})) -> Any:
        """See `AnySession.call`."""
        body = to_text([name, list(args), dict(kwargs)]).encode()
        return _value_of(self._program, lambda: self._program.question(body))

    @property
    def stdout(self) -> str:
        """What it printed until the last answer, as much of it as is kept."""
        return self._program.out.text()

    @property
    def stderr(self) -> str:
        return self._program.err.text()

    def close(self) -> None:
        """Idempotent."""
        self._program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sandbox:
    """A fork server and the level at which it runs programs. A context manager; may be used by several threads.

    It is made for the process that made it: not for one that was forked from that.
    """

    waited_s = 0.0

    def __init__(self, limits: Limits = DEFAULT_LIMITS, level: str | None = None) -> None:
        """level: "namespaces", "floor", or None for the strongest that this machine has. Raises UserError where it has
        none, or not that one, with what to install."""
        self.limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._server, self.level = start_server(level)

    @property
    def server_pid(self) -> int:
        """Of the process below which all programs are."""
        return self._server.pid

    def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> Ran:
        """See `AnySandbox.run`."""
        given = stdin.encode("utf-8", "surrogateescape")
        started = time.monotonic()
        try:
            return self._run(code, given, limits or self.limits, started)
        except ServerGone:
            return self._run(code, given, limits or self.limits, started)

    def open(self, code: str, limits: Limits | None = None) -> Session:
        """See `AnySandbox.open`."""
        program = self._start(False, code, b"", limits or self.limits)
        try:
            _value_of(program, program.answer)
        except BaseException:
            program.close()
            raise
        return Session(program)

    def close(self) -> None:
        """End everything that runs here. Idempotent."""
        with self._lock:
            self._closed = True
            self._server.close()

    def _run(self, code: str, stdin: bytes, limits: Limits, started: float) -> Ran:
        with closing(self._start(True, code, stdin, limits)) as program:
            end = program.wait()
        out, err = program.out, program.err
        cut = max(out.num_bytes - len(out.kept), err.num_bytes - len(err.kept)) > 0
        status = cast(Status, program.cause() or "ok")  # it has no descriptor for answers: no other cause
        return Ran(status, end.exit_code, out.text(), err.text(), cut, time.monotonic() - started)

    def _start(self, is_main: bool, code: str, stdin: bytes, limits: Limits) -> Program:
        """By the server, or by a new one where that was killed."""
        written = code.encode("utf-8", "surrogatepass")
        server = self._server
        try:
            return Program(server, is_main, written, stdin, limits)
        except ServerGone:
            return Program(self._renewed(server), is_main, written, stdin, limits)

    def _renewed(self, gone: ForkServer) -> ForkServer:
        with self._lock:
            if self._closed:
                raise SandboxFault("the sandbox is closed")
            if self._server is gone:
                gone.close()
                self._server = ForkServer(cast(LevelName, self.level.name))
            return self._server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _value_of(program: Program, ask: Callable[[], bytes]) -> Any:
    """What the answer holds. Raises Raised, Broken, SandboxFault."""
    try:
        kind, content = _read(ask())
    except ServerGone:
        raise SandboxFault("the fork server was killed while a program ran") from None
    except (ValueError, RecursionError) as error:
        program.kill("frame")
        raise Broken("frame", f"its answer cannot be read: {error}") from None
    if kind == "value":
        return content
    if kind == "refused":
        raise Broken("value", f"its answer is {content}")
    name, text = content
    if name == "MemoryError":
        program.kill("memory")
        raise program.broken()
    raise Raised(name, text)


def _read(body: bytes) -> tuple[str, Any]:
    """Raises ValueError for anything that no honest process writes."""
    if not body.startswith(_VALUE):
        content = json.loads(body)
        if isinstance(content, dict):
            if isinstance(content.get("refused"), str):
                return "refused", content["refused"][:_SHOWN_TEXT]
            match content.get("raised"):
                case [str(name), str(text)]:
                    return "raised", (name[:_SHOWN_TEXT], text[:_SHOWN_TEXT])
        raise ValueError("neither a value nor an error")
    return "value", from_text(body[len(_VALUE) : -1])
