"""`length`: is the response's length within limits?

In characters or words; DAPO's penalty in tokens, before `data.max_response_length`, is `reward.overlong`.
"""

from distflow.rewards.score import Case

CASES = (
    Case("an answer", None, True),
    Case("", None, False),
)
_UNITS = {"characters": len, "words": lambda text: len(text.split())}


def compute_score(
    solution_str: str, at_least: int = 1, at_most: int = 2**31, slope: int = 0, unit: str = "characters"
) -> float:
    """1.0 from `at_least` to `at_most`, 0.0 if it misses them by more than `slope`, linear between; in `unit`, which
    is "characters" or "words" (separated by white space).

    Raises ValueError for limits that leave no length, or another unit.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit={unit!r}: there are {', '.join(_UNITS)}")
    if not 0 <= at_least <= at_most or slope < 0:
        raise ValueError(f"at_least={at_least}, at_most={at_most}, slope={slope} leave no length")
    length = _UNITS[unit](solution_str)
    missed_by = max(at_least - length, length - at_most, 0)
    return max(0.0, 1.0 - missed_by / slope) if slope else float(missed_by == 0)
