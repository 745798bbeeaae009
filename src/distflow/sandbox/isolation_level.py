"""Which walls this machine can raise: found out by raising them and running a program that tries to pass."""

from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

from distflow.errors import UserError
from distflow.sandbox.fork_server import ForkServer, LevelName, ServerGone
from distflow.sandbox.limits import Limits, SandboxFault
from distflow.sandbox.running_program import Program

LEVELS: tuple[LevelName, ...] = ("namespaces", "floor")
"""The stronger first."""

INSTALL = (
    "namespaces need bubblewrap (apt-get install bubblewrap) and a machine that lets users make namespaces; the floor "
    "needs Linux 5.13 or newer with Landlock ('landlock' in the kernel's lsm=) and seccomp, on x86-64 or aarch64"
)

# Prints what it could do; each line stands for a wall.
_TRIES = """
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


class Level(NamedTuple):
    """name: "namespaces", "floor" or "none". missing: level → why it cannot be had, for those above it."""

    name: str
    missing: dict[str, str]

    def __str__(self) -> str:
        lacks = [f"no {name}: {reason}" for name, reason in self.missing.items()]
        return "; ".join([self.name, *lacks, *([INSTALL] if self.name == "none" else [])])


def probe() -> Level:
    """What there is on this machine."""
    server, level = _find(LEVELS)
    if server is not None:
        server.close()
    return level


def start_server(wanted: str | None = None) -> tuple[ForkServer, Level]:
    """A fork server at the strongest level, or at the one that is wanted. Raises UserError where there is none."""
    if wanted is not None and wanted not in LEVELS:
        raise UserError(f"no level '{wanted}' of the sandbox; there are {', '.join(LEVELS)}")
    server, level = _find([name for name in LEVELS if wanted in (None, name)])
    if server is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in level.missing.items())
        raise UserError(f"programs cannot be run here, since nothing would hold them ({reasons}); {INSTALL}")
    return server, level


def _find(names: Iterable[LevelName]) -> tuple[ForkServer | None, Level]:
    missing: dict[str, str] = {}
    for name in names:
        try:
            return _checked(name), Level(name, missing)
        except (SandboxFault, ServerGone) as fault:
            missing[name] = str(fault)
    return None, Level("none", missing)


def _checked(name: LevelName) -> ForkServer:
    """Raises SandboxFault, ServerGone."""
    server = ForkServer(name)
    try:
        with closing(Program(server, True, _TRIES.encode(), b"", Limits(wall_s=30.0))) as program:
            end, passed = program.wait(), program.out.text() + program.err.text()
        if end.exit_code or passed:
            raise SandboxFault(f"its walls do not hold: {', '.join(passed.splitlines()) or end}")
    except BaseException:
        server.close()
        raise
    return server
