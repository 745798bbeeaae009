"""What runs programs that nobody trusts, wherever it is: here (`sandbox.py`) or behind a URL (`remote.py`)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self

from distflow.sandbox.isolation_level import Level
from distflow.sandbox.limits import Limits

Status = Literal["ok", "exit", "time", "memory", "signal", "output"]


class Ran(NamedTuple):
    """What became of a program.

    status: "ok" for exit status 0. exit_code: negative for a signal, as of `subprocess`. stdout, stderr: the first
    `Limits.output_bytes` of each; cut: whether there was more. seconds: by the clock.
    """

    status: Status
    exit_code: int
    stdout: str
    stderr: str
    cut: bool
    seconds: float


class AnySession(Protocol):
    """A process that has executed a program as a module, and answers calls of its functions.

    Used by one thread at a time; a context manager, after which nothing is left of the process.
    """

    def call(self, name: str, args: Sequence[object] = (), kwargs: Mapping[str, object] = MappingProxyType({})) -> Any:
        """What the function of that name returns for these plain values (`inside.values`).

        A list comes back as a list, a tuple as a tuple, and so on; an int may be of any size, so that `repr` of it may
        raise. Raises `Raised` where the function raised, `Broken` where there is no answer and for one that is not
        plain; after a `Broken` of another cause than "value" every further call raises `Broken`. NotPlain for arguments
        that are not plain. SandboxFault.
        """

    @property
    def stdout(self) -> str:
        """What it printed until the last answer, as much of it as is kept."""

    @property
    def stderr(self) -> str:
        """The same of standard error."""

    def close(self) -> None:
        """Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class AnySandbox(Protocol):
    """limits: of a program that is given none. level: what holds them. waited_s: seconds that calls of it took in all,
    and no program did."""

    limits: Limits
    level: Level
    waited_s: float

    def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> Ran:
        """Run a program as `__main__`, in a fresh process; limits: its own, None for those of the sandbox. Raises
        SandboxFault where the machine fails, not for anything that the program does."""

    def open(self, code: str, limits: Limits | None = None) -> AnySession:
        """Execute a program as a module, in a fresh process; limits: as of `run`. Raises Raised, Broken;
        SandboxFault."""
