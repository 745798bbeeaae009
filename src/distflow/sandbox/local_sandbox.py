"""The local sandbox: runs untrusted programs, each in a new isolated process that leaves nothing
behind.

The isolation level is found by starting a fork server and running a program that tries to break the
isolation.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType
from typing import Any, Self, TypeVar, cast

from distflow.errors import UserError
from distflow.sandbox import interface
from distflow.sandbox.fork_server_client import ForkServer, LevelName, Program, ServerGone
from distflow.sandbox.inside.program_messages import from_text, to_text

LEVELS: tuple[LevelName, ...] = ("namespaces", "floor")
"""The stronger first."""

# Prints the name of each attempt that succeeds.
_ATTEMPTS = """
import ctypes, os, socket
def attempt(name, call):
    try:
        call()
    except OSError:
        return
    print(name)
attempt("start a process", lambda: os.fork() or os._exit(0))
attempt("open a socket", socket.socket)
attempt("read /etc/passwd", lambda: open("/etc/passwd").read())
attempt("read /proc/self/environ", lambda: open("/proc/self/environ").read())
attempt("write into /tmp", lambda: open("/tmp/distflow-sandbox-probe", "w").close())
attempt("signal its parent", lambda: os.kill(os.getppid(), 0))
attempt("run a program", lambda: os.execv("/bin/true", ["true"]))
"""
_VALUE = b'{"value": '
_SHOWN_TEXT = 2000


class Session(Program):
    """A process that has executed a program as a module, and answers calls to its functions. For
    one thread at a time."""

    def call(
        self,
        name: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Any:
        """Call the function of that name with plain values (`inside.program_messages`) and return
        its result.

        Types are preserved: a list comes back as a list, a tuple as a tuple. An int may have any
        size, so its `repr` may raise. Raises `Raised` if the function raised, `Broken` if there is
        no result or it is not plain; after a `Broken` of another cause than "value" every further
        call raises `Broken`. Raises NotPlain for arguments that are not plain, and SandboxFault.
        """
        body = to_text([name, list(args), dict(kwargs)]).encode()
        return _read_result(self, lambda: self.question(body))


Started = TypeVar("Started", bound=Program)


class Sandbox:
    """Runs untrusted programs, which end when it is closed. May be used by several threads, but
    only in the process that created it, not in a fork."""

    def __init__(
        self, limits: interface.Limits = interface.DEFAULT_LIMITS, level: str | None = None
    ) -> None:
        """level: "namespaces", "floor", or None for the strongest that this machine has. Raises
        UserError, with what to install, if it has no level or not this one."""
        if level is not None and level not in LEVELS:
            raise UserError(f"no level '{level}' of the sandbox; there are {', '.join(LEVELS)}")

        server, self.level = _find_level([name for name in LEVELS if level in (None, name)])
        if server is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.level.missing.items())
            raise UserError(
                f"programs cannot run here, because they would not be isolated ({reasons}); "
                f"{interface.INSTALL}"
            )

        self.limits = limits
        self._server = server
        self._lock = threading.Lock()
        self._closed = False

    def run(
        self, code: str, stdin: str = "", limits: interface.Limits | None = None
    ) -> interface.RunResult:
        """Run a program as `__main__` in a new process. limits: None for those of the sandbox.
        Raises SandboxFault if the machine fails, but nothing because of the program."""
        started = time.monotonic()
        encoded = stdin.encode("utf-8", "surrogateescape")
        try:
            return self._run(code, encoded, limits or self.limits, started)
        except ServerGone:
            return self._run(code, encoded, limits or self.limits, started)

    def open(self, code: str, limits: interface.Limits | None = None) -> Session:
        """Execute a program as a module in a new process; limits: as for `run`. Raises Raised,
        Broken, SandboxFault."""
        session = self._start(Session, code, b"", limits or self.limits)
        with ExitStack() as on_failure:
            on_failure.callback(session.close)
            _read_result(session, session.answer)
            on_failure.pop_all()
        return session

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, code: str, stdin: bytes, limits: interface.Limits, started: float
    ) -> interface.RunResult:
        with closing(self._start(Program, code, stdin, limits)) as program:
            end = program.wait()
        out = program.out
        err = program.err
        cut = max(out.num_bytes - len(out.content), err.num_bytes - len(err.content)) > 0

        # Without a descriptor for results there is no other cause.
        status = cast(interface.Status, program.cause() or "ok")
        return interface.RunResult(
            status, end.exit_code, out.text(), err.text(), cut, time.monotonic() - started
        )

    def _start(
        self, kind: type[Started], code: str, stdin: bytes, limits: interface.Limits
    ) -> Started:
        """Start a program through the server, or a new one if it was killed."""
        server = self._server
        is_main = kind is Program

        encoded = code.encode("utf-8", "surrogatepass")
        try:
            return kind(server, is_main, encoded, stdin, limits)
        except ServerGone:
            return kind(self._replace_server(server), is_main, encoded, stdin, limits)

    def _replace_server(self, gone: ForkServer) -> ForkServer:
        with self._lock:
            if self._closed:
                raise interface.SandboxFault("the sandbox is closed")
            if self._server is gone:
                gone.close()
                self._server = ForkServer(cast(LevelName, self.level.name))
            return self._server


def probe() -> interface.Level:
    """The strongest level that this machine has."""
    server, level = _find_level(LEVELS)
    if server is not None:
        server.close()
    return level


def _find_level(names: Iterable[LevelName]) -> tuple[ForkServer | None, interface.Level]:
    """The first level that works, and a fork server for it; None with the level "none"."""
    missing: dict[str, str] = {}
    for name in names:
        try:
            return _start_checked(name), interface.Level(name, missing)
        except (interface.SandboxFault, ServerGone) as fault:
            missing[name] = str(fault)

    return None, interface.Level("none", missing)


def _start_checked(name: LevelName) -> ForkServer:
    """Start and check a fork server. Raises SandboxFault, ServerGone."""
    server = ForkServer(name)
    with ExitStack() as on_failure:
        on_failure.callback(server.close)
        with closing(
            Program(server, True, _ATTEMPTS.encode(), b"", interface.Limits(wall_s=30.0))
        ) as program:
            end = program.wait()
            passed = program.stdout + program.stderr

        if end.exit_code or passed:
            raise interface.SandboxFault(
                f"its isolation does not hold: {', '.join(passed.splitlines()) or end}"
            )

        on_failure.pop_all()

    return server


def _read_result(program: Program, ask: Callable[[], bytes]) -> Any:
    """The value of a result, as `inside.forked_program` writes it. Raises Raised, Broken,
    SandboxFault."""
    try:
        body = ask()
        if body.startswith(_VALUE):
            return from_text(body[len(_VALUE) : -1])

        match json.loads(body):
            case {"refused": str(reason)}:
                raise interface.Broken("value", f"its answer is {reason[:_SHOWN_TEXT]}")
            case {"raised": ["MemoryError", str()]}:
                program.kill("memory")
                raise program.broken()
            case {"raised": [str(name), str(text)]}:
                raise interface.Raised(name[:_SHOWN_TEXT], text[:_SHOWN_TEXT])

        raise ValueError("neither a value nor an error")
    except ServerGone:
        raise interface.SandboxFault("the fork server was killed while a program ran") from None
    except (ValueError, RecursionError) as error:
        program.kill("frame")
        raise interface.Broken("frame", f"its answer cannot be read: {error}") from None
