"""Plain decimal numbers, compared exactly or as roundings of one another."""

import re
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal
from fractions import Fraction

from distflow.rewards.math_bounds import MAX_BITS

ROUNDED_DECIMALS = 6
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?", re.ASCII)
_LATEX_FRACTION = r"\\frac\s*\{\s*(-?\d{1,50})\s*\}\s*\{\s*(-?\d{1,50})\s*\}"
_FRACTION = re.compile(rf"(-?)\s*(?:{_LATEX_FRACTION}|(\d{{1,50}})\s*/\s*(\d{{1,50}}))", re.ASCII)
_EXACTLY = Context(prec=2 * MAX_BITS, rounding=ROUND_HALF_UP)


def numbers_equal(gold: Decimal, answer: Decimal) -> bool:
    """Exact, but where the shorter is the longer one rounded."""
    shorter, longer = sorted((gold, answer), key=num_decimals)
    return gold == answer or is_rounded(longer, shorter)


def is_rounded(exact: Decimal, decimal: Decimal) -> bool:
    """Whether a decimal of `ROUNDED_DECIMALS` or more places is the value rounded or cut off there."""
    if num_decimals(decimal) < ROUNDED_DECIMALS or num_decimals(exact) == num_decimals(decimal):
        return False
    return decimal in (_EXACTLY.quantize(exact, decimal), exact.quantize(decimal, ROUND_DOWN, _EXACTLY))


def fraction(text: str) -> Fraction | None:
    r"""The value of `\frac{3}{4}`, `-3/4` or a short decimal, found without a parser; None for all else."""
    found = _FRACTION.fullmatch(text)
    if found is None:
        number = plain_number(text)
        return None if number is None or num_decimals(number) >= ROUNDED_DECIMALS else Fraction(number)
    numerator, denominator = int(found[2] or found[4]), int(found[3] or found[5])
    return None if denominator == 0 else Fraction(-numerator if found[1] else numerator, denominator)


def num_decimals(number: Decimal) -> int:
    return max(0, -int(number.as_tuple().exponent))


def plain_number(text: str) -> Decimal | None:
    """The value of a plain decimal number, thousands separators and `a \\cdot 10^{b}` included; None for all else."""
    mantissa, power, exponent = text.partition(r" \cdot 10^{")
    if not re.search(r"\d", mantissa) or not _PLAIN_NUMBER.fullmatch(mantissa):
        return None
    try:
        return Decimal(mantissa.replace(",", "") + (f"e{exponent.rstrip('}')}" if power else ""))
    except ArithmeticError:
        return None
