"""What comes of a program that gives no value.

What one program may use.
"""

from typing import Literal, NamedTuple

Cause = Literal["exit", "time", "memory", "signal", "output", "frame", "value"]
"""exit: it ended. time: of the processor or by the clock. memory: it had no more. signal: the kernel ended it. output:
it printed too much. frame: it wrote nonsense where answers go. value: its answer is no plain value."""


class Raised(Exception):
    """The program raised an error. type: its name; text: its message. Both are the program's own words."""

    def __init__(self, type: str, text: str) -> None:
        super().__init__(f"{type}: {text}")
        self.type = type
        self.text = text


class Broken(Exception):
    """There is no answer, and there will be none of this process."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


class SandboxFault(RuntimeError):
    """The sandbox itself does not work: a fault of the machine, not a result of a program."""


class Limits(NamedTuple):
    """cpu_s: of the processor, rounded up to whole seconds. wall_s: while it is waited for, all its calls together.
    memory_bytes: address space. open_files: descriptors. printed_bytes: to standard output and error, each; who prints
    more is ended. output_bytes: how much of each is kept.
    """

    cpu_s: float = 3.0
    wall_s: float = 6.0
    memory_bytes: int = 2**30
    open_files: int = 64
    printed_bytes: int = 16 * 2**20
    output_bytes: int = 64 * 1024


DEFAULT_LIMITS = Limits()
