r"""`math`: is the final answer mathematically equal to the ground truth? Judged by math-verify, after normalisation.

math-verify merges neighbouring boxes into a set, misses `42.`, `1e2` and `1\,000`, and rounds at the sixth decimal, so
that 1e-7 equals 2e-7 to it. Here the last box wins, numbers are normalised first, plain numbers are compared exactly.
"""

import logging
import math
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig
from math_verify.errors import TimeoutException
from sympy import Basic, Expr

from distflow.rewards.answers import last_box, marked_answer, phrased_answer
from distflow.rewards.case import Case

# Deadlines are the pool's: it kills the process. math-verify's own, by SIGALRM, cannot interrupt C code.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

_EXTRACTION = (LatexExtractionConfig(), ExprExtractionConfig())
_THIN_SPACES = re.compile("(?<=\\d)(?:\\\\[,;:! ]|~|\\\\thinspace(?![A-Za-z])|[\u2009\u202f\u00a0]| )(?=\\d{3}(?!\\d))")
_SCIENTIFIC = re.compile(r"(?<![\w\\.])(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.]*\w)")
_CURRENCY_MARK = re.compile(r"\\?\$(?=\s?\d[\d,]*(?:\.\d+)?[.,;:!?)*]*(?:\s+[A-Za-z(]|\s*$|\s*\n))")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_NUMBERS_IN_A_ROW = re.compile(r"[\d.]+(?: [\d.]+)+")
_ROUNDED_DECIMALS = 6
_RELATIVE_TOLERANCE = Decimal("1e-6")
_SMALL = 1e-3

CASES = (
    Case(r"3 + 4 = 7, so \boxed{7}.", "7", True),
    Case(r"first \boxed{6}, then again: \boxed{\frac{14}{2}}", "so 3 + 4 = 7\n#### 7", True),
    Case(r"\boxed{1\,000}", "1e3", True),
    Case(r"\boxed{7} or rather \boxed{8}", "7", False),
    Case(r"\boxed{[2,5]}", "[2,5)", False),
    Case("", "7", False),
)


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """1.0 where the answer equals the ground truth (or one of them, where it is a list), else 0.0.

    Raises ValueError where there is no ground truth to compare with.
    """
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    golds = [gold_answer(gold) for gold in alternatives]
    if not golds:
        raise ValueError("the ground truth is an empty list")
    marked = marked_answer(solution_str)
    return float(
        any(is_equal(gold, marked) if marked is not None else _prose_equals(gold, solution_str) for gold in golds)
    )


def gold_answer(ground_truth: object) -> str:
    """The bare answer of a data set's row: a number, LaTeX, or a worked solution that marks its answer."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, int | float | str):
        raise ValueError(f"the ground truth is {ground_truth!r}: 'math' needs a number or a text (data.answer_key)")
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    if isinstance(ground_truth, float) and not math.isfinite(ground_truth):
        raise ValueError(f"the ground truth is {ground_truth} (data.answer_key)")
    if isinstance(ground_truth, int | float):
        return normalise(repr(ground_truth))
    marked = marked_answer(ground_truth)
    answer = normalise(ground_truth if marked is None else marked)
    if not answer:
        raise ValueError(f"no answer in the ground truth {ground_truth[:80]!r} (data.answer_key)")
    return answer


def normalise(answer: str) -> str:
    r"""Without delimiters, currency marks, trailing stops, thin spaces in numbers; `1e2` as a power of ten."""
    inner = last_box(answer)
    answer = answer if inner is None else inner
    answer = answer.replace(r"\$", "").replace("$", "").replace("**", "").replace("−", "-")
    answer = answer.replace("{,}", ",").replace(r"\varnothing", r"\emptyset")
    answer = re.sub(r"\\[()\[\]]|\\(?:displaystyle|left|right)(?![A-Za-z])", "", " ".join(answer.split()))
    answer = re.sub(r"[\s.,;:]+$", "", re.sub(r"(?:\\[,;:! ]|~)+$", "", answer.strip()))
    answer = _THIN_SPACES.sub("", answer)
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", answer).strip()


def is_equal(gold: str, answer: str) -> bool:
    """gold: as `gold_answer` gives it. answer: what stood in the box or after the mark."""
    answer = normalise(answer)
    if not answer:
        return False
    gold_number, number = _plain_number(gold), _plain_number(answer)
    if gold_number is not None and number is not None:
        return _numbers_equal(gold_number, number)
    if _NUMBERS_IN_A_ROW.fullmatch(answer):
        return answer == gold  # math-verify would multiply them
    return _verify(_parse_latex(gold), _parse(f"${answer}$"))


def _prose_equals(gold: str, text: str) -> bool:
    """The answer was not marked: look at what follows "answer is", else where math-verify looks."""
    phrase = phrased_answer(text)
    for prose in (_cleaned(part) for part in (phrase, text) if part is not None):
        bare = normalise(prose)
        if _plain_number(bare) is not None:
            return is_equal(gold, bare)
        parsed = _parse(prose)
        if parsed:
            return _parsed_equals(gold, parsed)
    return False


def _cleaned(prose: str) -> str:
    prose = _CURRENCY_MARK.sub("", prose).replace(r"\$", "")
    return _SCIENTIFIC.sub(r"$\1 \\cdot 10^{\2}$", _THIN_SPACES.sub("", prose))


def _parsed_equals(gold: str, parsed: list[Basic | str]) -> bool:
    """math-verify's own reading of a text, plain numbers compared exactly."""
    gold_number = _plain_number(gold)
    number = next((_plain_number(found) for found in parsed if isinstance(found, str)), None)
    if gold_number is not None and number is not None:
        return _numbers_equal(gold_number, number)
    return _verify(_parse_latex(gold), parsed)


def _plain_number(text: str) -> Decimal | None:
    """The value of a plain decimal number, thousands separators and `a \\cdot 10^{b}` included; None for all else."""
    mantissa, power, exponent = text.partition(r" \cdot 10^{")
    if not re.search(r"\d", mantissa) or not _PLAIN_NUMBER.fullmatch(mantissa):
        return None
    try:
        number = Decimal(mantissa.replace(",", ""))
        return number.scaleb(int(exponent.rstrip("}"))) if power else number
    except (InvalidOperation, ValueError):
        return None


def _numbers_equal(gold: Decimal, answer: Decimal) -> bool:
    """Exact, but where one of them is a long decimal: those are roundings, equal to a relative 1e-6."""
    if gold == answer:
        return True
    decimals = max(-int(number.as_tuple().exponent) for number in (gold, answer))
    if decimals < _ROUNDED_DECIMALS:
        return False
    return abs(gold - answer) <= _RELATIVE_TOLERANCE * max(abs(gold), abs(answer))


@lru_cache(maxsize=1024)
def _parse_latex(gold: str) -> tuple[Basic | str, ...]:
    """The n samples of a group share their ground truth."""
    return tuple(_parse(f"${gold}$"))


def _parse(text: str) -> list[Basic | str]:
    """Raises MemoryError, as `_verify` does: it says nothing about the answer, and math-verify would call it wrong."""
    try:
        return math_verify.parse(text, extraction_config=_EXTRACTION, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except (Exception, TimeoutException):  # nonsense, which is no answer
        return []


def _verify(gold: tuple[Basic | str, ...], answer: list[Basic | str]) -> bool:
    try:
        equal = math_verify.verify(list(gold), answer, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except (Exception, TimeoutException):  # sympy raises all sorts on nonsense, which is no answer
        return False
    return bool(equal) and not _differ_below_rounding(gold, answer)


def _differ_below_rounding(gold: tuple[Basic | str, ...], answer: list[Basic | str]) -> bool:
    """True for small numbers that math-verify calls equal because it rounds at the sixth decimal."""
    first, second = _real_value(gold), _real_value(answer)
    if first is None or second is None or abs(first) >= _SMALL:
        return False
    return abs(first - second) > float(_RELATIVE_TOLERANCE) * max(abs(first), abs(second))


def _real_value(parsed: Sequence[Basic | str]) -> float | None:
    """The value of the first expression, where it is a real number."""
    number = next((found for found in parsed if isinstance(found, Expr)), None)
    return float(number.evalf()) if number is not None and number.is_number and number.is_real else None
