"""A reward function that tests workers: it fails in the way that it is told to, or returns a number
from its arguments."""

import hashlib
import json

ECHO = "(echo)"


def fail(solution_str: str, ground_truth: object = None, extra_info: object = None) -> object:
    """Raise an error, or with `ECHO` in the response return `echo`."""
    if ECHO in solution_str:
        return echo(solution_str, ground_truth, extra_info)
    raise ValueError("as it should")


def echo(solution_str: str, ground_truth: object, extra_info: object) -> float:
    """A number that changes with any change of the arguments."""
    text = json.dumps([solution_str, ground_truth, extra_info], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") / 2**48
