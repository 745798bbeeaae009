"""Tools that do what tools should not."""

import asyncio
import os
import signal
import subprocess
import sys
import time

_total = 0


def total(amount: int) -> int:
    """Adds an amount to a total that lasts for the episode.

    Args:
        amount: What to add.
    """
    global _total
    _total += amount
    return _total


async def later(a: int, b: int = 2) -> dict[str, int]:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0)
    return {"sum": a + b}


def secret(word: str, key: str = "") -> str:
    """Joins a word and a key that the config gives.

    Args:
        word: The word.
        key: The key.
    """
    return word + key


def hangs() -> str:
    """Never ends."""
    while True:
        time.sleep(1)


def exits() -> str:
    """Ends its process."""
    os._exit(3)


def asks_to_exit() -> str:
    """Asks to exit."""
    sys.exit(4)


def crashes() -> str:
    """Is killed."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def forks() -> str:
    """Returns twice."""
    os.fork()
    return "forked"


def starts(file: str) -> str:
    """Leaves a process behind, and its id in a file.

    Args:
        file: The file.
    """
    with open(file, "w") as written:
        written.write(str(subprocess.Popen(["sleep", "600"]).pid))
    return "started"


def fills() -> str:
    """Needs more memory than it gets."""
    return "x" * 10**11


def raises() -> str:
    """Raises."""
    raise KeyError("no such thing")


def colours() -> str:
    """Writes for a terminal."""
    print("\x1b[2J")
    return "\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07and\tplain\n"


def returns_bytes() -> bytes:
    """Returns bytes."""
    return b"\xff"


def returns_nan() -> float:
    """Returns no JSON."""
    return float("nan")


def returns_much() -> str:
    """Returns a megabyte."""
    return "x" * 1_000_000


def half() -> str:
    """Returns half of a pair."""
    return "a\ud800b"


def undescribed(a, b):
    return a + b
