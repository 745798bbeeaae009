"""The built-in rewards `exact_match`, `format`, `length` and `repetition`, which read only the text
of a response."""

import re
from collections.abc import Mapping

from distflow.rewards.extracted_answers import bare_answer, last_box

PATTERN_KEY = "format_regex"
_UNITS = {"characters": len, "words": lambda text: len(text.split())}


def exact_match(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
) -> float:
    """1.0 if the final answer is the ground truth, character by character (ignoring white space),
    else 0.0.

    The answer is the last box, else the text after the last `####`, else the whole response.
    ground_truth: str or a number, or a list of accepted ones. Raises ValueError if there is none.
    """
    if isinstance(ground_truth, list | tuple):
        golds = ground_truth
    else:
        golds = [ground_truth]

    if not golds or any(gold is None or isinstance(gold, dict) for gold in golds):
        raise ValueError(
            f"the ground truth is {ground_truth!r}: 'exact_match' needs a str or a number "
            "(data.answer_key)"
        )

    return float(
        bare_answer(solution_str).split() in [bare_answer(str(gold)).split() for gold in golds]
    )


def has_format(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    r"""1.0 if the response has a complete, non-empty `\boxed{...}`, else 0.0.

    If a row's extra_info has `format_regex`, that expression must match the whole response instead
    ("." also matches line ends). Raises ValueError if it is not a valid expression.
    """
    pattern = (extra_info or {}).get(PATTERN_KEY)
    if pattern is None:
        return float(bool((last_box(solution_str) or "").strip()))
    if not isinstance(pattern, str):
        raise ValueError(f"extra_info['{PATTERN_KEY}'] is {pattern!r}, not a regular expression")

    try:
        return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)
    except re.error as error:
        raise ValueError(
            f"extra_info['{PATTERN_KEY}'] is not a regular expression: {error}"
        ) from error


def length(
    solution_str: str,
    at_least: int = 1,
    at_most: int = 2**31,
    slope: int = 0,
    unit: str = "characters",
) -> float:
    """1.0 from `at_least` to `at_most`, 0.0 if it misses them by more than `slope`, linear between;
    in `unit`, which is "characters" or "words" (separated by white space). DAPO's penalty in
    tokens, before `data.max_response_length`, is `reward.overlong`.

    Raises ValueError for limits that exclude all lengths, or another unit.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit={unit!r}: there are {', '.join(_UNITS)}")
    if not 0 <= at_least <= at_most or slope < 0:
        raise ValueError(
            f"at_least={at_least}, at_most={at_most}, slope={slope} exclude all lengths"
        )

    number = _UNITS[unit](solution_str)
    missed_by = max(at_least - number, number - at_most, 0)
    if slope:
        return max(0.0, 1.0 - missed_by / slope)

    return float(missed_by == 0)


def repetition(solution_str: str, n: int = 3, unit: str = "words") -> float:
    """1 - distinct n-grams / n-grams, in lower case: 0.0 if no n-gram occurs twice or the response
    has none, almost 1.0 if it keeps repeating one. (Yeo et al. 2025, "Demystifying Long
    Chain-of-Thought Reasoning in LLMs", arXiv
    2502.03373, appendix C.2; there and in open-r1 times a negative maximum, here the part's
    weight.)

    n: length of an n-gram, in `unit`: "words" (separated by white space) or "characters" (for
    scripts without it). Raises ValueError for an n below 1 or another unit.
    """
    if n < 1:
        raise ValueError(f"n={n}: an n-gram has at least 1 part")
    if unit not in ("words", "characters"):
        raise ValueError(f"unit={unit!r}: there are words, characters")

    text = solution_str.lower()
    parts = text.split() if unit == "words" else "".join(text.split())
    number = len(parts) - n + 1
    if number < 1:
        return 0.0

    return 1.0 - len({tuple(parts[start : start + n]) for start in range(number)}) / number
