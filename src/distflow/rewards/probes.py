"""What a verifier pool is certified with: functions that give no verdict, each in a way of its own."""

import math
import os
import re


def hang(solution_str: str, extra_info: object = None) -> float:
    """Backtracks for ages inside the C code of `re`, holding the interpreter."""
    return float(re.match(r"(a|aa)+$", "a" * 200 + "b") is not None)


def fail(solution_str: str, extra_info: object = None) -> float:
    raise ValueError("as it should")


def fail_by_key(solution_str: str, extra_info: object = None) -> float:
    raise KeyError("as it should")


def not_a_number(solution_str: str, extra_info: object = None) -> float:
    return math.nan


def nothing(solution_str: str, extra_info: object = None) -> None:
    return None


def a_text(solution_str: str, extra_info: object = None) -> str:
    return "1.0"


def leave(solution_str: str, extra_info: object = None) -> float:
    """Ends the process, as a crash does."""
    os._exit(0)
