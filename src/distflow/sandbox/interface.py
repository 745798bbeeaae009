"""Limits, results and errors of the sandbox."""

from typing import Literal, NamedTuple

INSTALL = (
    "namespaces need bubblewrap (apt-get install bubblewrap) and a machine that lets users make "
    "namespaces; the floor needs Linux 5.13 or newer with Landlock ('landlock' in the kernel's "
    "lsm=) and seccomp, on x86-64 or aarch64"
)

Cause = Literal["exit", "time", "memory", "signal", "output", "frame", "value"]
"""exit: the process ended. time: CPU or wall-clock limit. memory: limit reached. signal: killed by
the kernel. output: printed too much. frame: wrote an invalid message to the result descriptor.
value: the result is not a plain value."""
Status = Literal["ok", "exit", "time", "memory", "signal", "output"]


class Raised(Exception):
    """The program raised an error. type: its name; text: its message. Both are untrusted text of
    the program."""

    def __init__(self, type: str, text: str) -> None:
        super().__init__(f"{type}: {text}")
        self.type = type
        self.text = text


class Broken(Exception):
    """The call has no result, and unless the cause is "value" the process will give no further
    ones."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


class SandboxFault(RuntimeError):
    """The sandbox itself does not work: a fault of the machine, not a result of a program."""


class Limits(NamedTuple):
    """Limits of one program."""

    cpu_s: float = 3.0
    """CPU time, rounded up to whole seconds."""
    wall_s: float = 6.0
    """Time spent waiting for it, all calls together."""
    memory_bytes: int = 2**30
    """Address space."""
    open_files: int = 64
    """Descriptors."""
    printed_bytes: int = 16 * 2**20
    """To standard output and error, each; a program that prints more is killed."""
    output_bytes: int = 64 * 1024
    """How much of each is returned."""


DEFAULT_LIMITS = Limits()


class Level(NamedTuple):
    """How strongly programs are isolated."""

    name: str
    """ "namespaces", "floor" or "none"."""
    missing: dict[str, str]
    """Why each stronger level is unavailable."""

    def __str__(self) -> str:
        lacks = [f"no {name}: {reason}" for name, reason in self.missing.items()]
        return "; ".join([self.name, *lacks, *([INSTALL] if self.name == "none" else [])])


class RunResult(NamedTuple):
    """How a program ended."""

    status: Status
    """ "ok" for exit status 0."""
    exit_code: int
    """Negative for a signal, as in `subprocess`."""
    stdout: str
    """The first `Limits.output_bytes`."""
    stderr: str
    """Likewise."""
    cut: bool
    """Whether there was more."""
    seconds: float
    """Wall-clock time."""
