"""What a verifier pool is certified with: a function that raises, and one that hangs where no signal handler runs."""

import re


def hang(solution_str: str, extra_info: object = None) -> float:
    """Backtracks for ages inside the C code of `re`, holding the interpreter."""
    return float(re.match(r"(a|aa)+$", "a" * 200 + "b") is not None)


def fail(solution_str: str, extra_info: object = None) -> float:
    """Raises."""
    raise ValueError("as it should")
