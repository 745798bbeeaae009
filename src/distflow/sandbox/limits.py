"""What one program may use."""

from typing import NamedTuple


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
