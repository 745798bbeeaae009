"""`format`: does the response have the required format?"""

import re
from collections.abc import Mapping

from distflow.rewards.extracted_answers import last_box
from distflow.rewards.score import Case

PATTERN_KEY = "format_regex"
CASES = (
    Case(r"so \boxed{7}", None, True),
    Case("so 7", None, False),
    Case(r"so \boxed{7", None, False),
    Case("<think>a</think>7", None, True, {PATTERN_KEY: "<think>.*</think>.+"}),
    Case("7", None, False, {PATTERN_KEY: "<think>.*</think>.+"}),
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None = None
) -> float:
    r"""1.0 where the response has a complete, non-empty `\boxed{...}`, else 0.0.

    If a row's extra_info has `format_regex`, that expression must match the whole response instead ("." also matches
    line ends). Raises ValueError if it is not a valid expression.
    """
    pattern = (extra_info or {}).get(PATTERN_KEY)
    if pattern is None:
        return float(bool((last_box(solution_str) or "").strip()))
    if not isinstance(pattern, str):
        raise ValueError(f"extra_info['{PATTERN_KEY}'] is {pattern!r}, no regular expression")
    try:
        return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)
    except re.error as error:
        raise ValueError(f"extra_info['{PATTERN_KEY}'] is no regular expression: {error}") from error
