r"""Compares two formulas with math-verify, and numbers exactly or as roundings of each other.

math-verify alone rounds at the sixth decimal, so that 1e-7 equals 2e-7, and 2^{2017} equals
2^{2017} - 1.

Also whether an answer states a value, or only how to compute one: a policy that copies the problem
has the right value, since `347 + 589` is 936. So a number must be answered by a number, and any
other ground truth by an expression of its form: with no other operators, and for a constant no more
of them.

The cost of comparing an answer is bounded before evaluation, since the policy writes the answer: a
number like `9^{9^{9}}` or `\binom{10^9}{10^8}` would take all time and memory.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import math_verify
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import grader
from sympy import (
    Basic,
    Derivative,
    Expr,
    Float,
    I,
    Integral,
    Limit,
    MatrixBase,
    Pow,
    Product,
    Sum,
    Symbol,
    nan,
    zoo,
)
from sympy.core.function import AppliedUndef

from distflow.rewards.math.notation import unwrap, words

MAX_CHARACTERS = 1_000
MAX_DEPTH = 10
MAX_BITS = 30_000

_TOKEN = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\\[A-Za-z]+|\\.|\S", re.ASCII | re.DOTALL)
_OPENING = ("{", "(", "[", r"\{")
_CLOSING = ("}", ")", "]", r"\}")
_VALUES = frozenset((r"\pi", r"\infty", r"\tau", r"\phi", r"\varphi"))
_REPEATED = frozenset((r"\sum", r"\prod"))
_FACTORIALS = frozenset((r"\binom", r"\dbinom", r"\tbinom", r"\Gamma", r"\gamma"))
_EXPONENTIALS = frozenset((r"\exp", r"\sinh", r"\cosh", r"\tanh"))
_FUNCTIONS = r"gcd|lcm|floor|ceil|sgn|Re|Im|a(?:rc?)?(?:sin|cos|tan|csc|sec|cot)h?"
_REFUSED = re.compile(
    r"\\choose|\\xrightarrow|\\operatorname\*?(?!\s*\{\s*(?:" + _FUNCTIONS + r")\s*\})"
)
_BITS_OF_A_LETTER = 2.0  # π and e are below 4


def is_affordable(answer: str) -> bool:
    """False for a text that is too long or too deep, or if its value may have more than `MAX_BITS`
    bits.

    The value is bounded from above as the text is read, e.g. bits(a^b) ≤ bits(a) · 2^bits(b).
    """
    if len(answer) > MAX_CHARACTERS or _REFUSED.search(answer):
        return False
    reader = _Reader(_TOKEN.findall(answer))
    return sum(reader.sequence() for _ in iter(reader.has_more, False)) <= MAX_BITS


class _Reader:
    """Reads tokens once, from left to right; each method returns an upper bound of log2 |value|, at
    least 0."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def has_more(self) -> bool:
        return self.position < len(self.tokens)

    def sequence(self) -> float:
        """Read up to and including a closing bracket: bits of a sum or a product are at most the
        sum of bits."""
        total = 0.0
        while self.has_more():
            if self.tokens[self.position] in _CLOSING:
                self.position += 1
                break
            total += self.powers()

        return total

    def powers(self) -> float:
        r"""One item with the powers, factorials and, for `\sum` and `\prod`, the bounds that follow
        it."""
        token = self._next()
        if self.depth == MAX_DEPTH:
            return math.inf

        self.depth += 1
        is_repeated = token in _REPEATED

        if token in _FACTORIALS:
            bits = _factorial(self.powers())
        elif token in _EXPONENTIALS:
            bits = _BITS_OF_A_LETTER * _power_of_two(self.powers())
        else:
            bits = 1.0 if is_repeated else self._item(token)

        while (sign := self._next("^", "_", "!")) != "":
            if sign == "!":
                bits = _factorial(bits)
            elif sign == "^":
                while self._next("-", "+"):
                    pass
                bits = max(bits, 1.0) * _power_of_two(self.powers())
            else:
                subscript = self._item(self._next())
                bits += _power_of_two(subscript) if is_repeated else subscript

        self.depth -= 1
        return bits

    def _item(self, token: str) -> float:
        if token in _OPENING:
            return self.sequence()
        if token[:1].isdigit():
            return _bits_of_number(token)
        if token in _VALUES or token.isalpha():
            return _BITS_OF_A_LETTER
        return 0.0

    def _next(self, *expected: str) -> str:
        """The next token if it is one of the expected ones or none are named; else ''."""
        if self.has_more() and (not expected or self.tokens[self.position] in expected):
            self.position += 1
            return self.tokens[self.position - 1]
        return ""


def _bits_of_number(token: str) -> float:
    """Bits of numerator and denominator together."""
    mantissa, _, exponent = token.lower().partition("e")
    digits = len(mantissa) + (float(exponent or "0").__abs__() if len(exponent) < 9 else math.inf)
    if mantissa.isdigit() and digits < 16:
        return math.log2(max(float(mantissa), 2.0))
    return digits * math.log2(10)


def _power_of_two(bits: float) -> float:
    return 2.0**bits if bits < 64 else math.inf


def _factorial(bits: float) -> float:
    return _power_of_two(bits) * max(bits, 1.0)


ROUNDED_DECIMALS = 6
_ROUNDED_TO = Decimal("1e-3")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?", re.ASCII)
_EXACTLY = Context(prec=2 * MAX_BITS, rounding=ROUND_HALF_UP)


def numbers_equal(gold: Decimal, answer: Decimal) -> bool:
    """Whether two numbers are equal, or one is the other rounded to fewer decimals."""
    return gold == answer or _is_rounded(gold, answer) or _is_rounded(answer, gold, may_be_cut=True)


def _is_rounded(exact: Decimal, decimal: Decimal, may_be_cut: bool = False) -> bool:
    """Whether a decimal of `ROUNDED_DECIMALS` or more places is the exact value, rounded by at most
    a thousandth of it:
    0.000000 is no rounding of 1e-7. may_be_cut: truncated will do, as in the ground truths of some
    data sets."""
    if num_decimals(decimal) < ROUNDED_DECIMALS or num_decimals(exact) <= num_decimals(decimal):
        return False
    is_rounding = decimal == _EXACTLY.quantize(exact, decimal) or (
        may_be_cut and _is_rounding(exact, decimal)
    )
    return is_rounding and abs(exact - decimal) <= abs(exact) * _ROUNDED_TO


def _is_rounding(exact: Decimal, decimal: Decimal) -> bool:
    return decimal in (
        _EXACTLY.quantize(exact, decimal),
        exact.quantize(decimal, ROUND_DOWN, _EXACTLY),
    )


def is_approximation(exact: str, decimal: str) -> bool:
    """Whether a plain decimal is the value of an expression, rounded or truncated to any number of
    places."""
    number = plain_number(decimal)
    parsed = _parse(exact)
    if number is None or not isinstance(parsed, Expr):
        return False

    def evaluated() -> float | None:
        if parsed.is_number and parsed.is_real:
            return float(parsed.evalf())
        return None

    value = _attempt(evaluated)
    return value is not None and _is_rounding(Decimal(value), number)


def num_decimals(number: Decimal) -> int:
    return max(0, -int(number.as_tuple().exponent))


def plain_number(text: str) -> Decimal | None:
    """The value of a plain decimal number, with thousands separators or as `a \\cdot 10^{b}`; else
    None."""
    mantissa, power, exponent = text.partition(r" \cdot 10^{")
    if not re.search(r"\d", mantissa) or not _PLAIN_NUMBER.fullmatch(mantissa):
        return None

    try:
        return Decimal(mantissa.replace(",", "") + (f"e{exponent.rstrip('}')}" if power else ""))
    except ArithmeticError:
        return None


_NOT_SWALLOWED = {MemoryError, RuntimeError, RecursionError}  # the last is a `RuntimeError`
_KINDS = {*Exception.__subclasses__(), *RuntimeError.__subclasses__()}
_SWALLOWED = tuple(_KINDS - _NOT_SWALLOWED)
# Replaces `Exception` in the handlers of these modules, which would treat a full memory as a
# difference.
for _module in (grader, latex2sympy2):
    setattr(_module, "Exception", _SWALLOWED)  # noqa: B010  no attribute that it has

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

_SYNTAX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_IMAGINARY = (Symbol("i", real=True), Symbol("i"))
_NOT_POINTWISE = (Integral, Derivative, Limit, Sum, Product, AppliedUndef)
_SMALL_GAP = 1e-9
_RELATIVE_TOLERANCE = 1e-6
_Result = TypeVar("_Result")


def expressions_equal(gold: str, answer: str) -> bool:
    """Compare two affordable expressions (`is_affordable`). One that cannot be parsed, or makes
    sympy raise, equals nothing.

    Raises MemoryError and RecursionError if the answer could not be compared; one that is too deep
    to be parsed or evaluated alone equals nothing.
    """
    first = _parse(gold)
    try:
        second = _parse(answer)
    except RecursionError:
        return False

    if first is None or second is None or _divides_by_zero(second):
        return False

    try:
        return _attempt(lambda: _compare(first, second, gold, answer)) or False
    except RecursionError:
        if _is_endless(second) and not _is_endless(first):
            return False
        raise


def _attempt(compute: Callable[[], _Result]) -> _Result | None:
    """The result; None if it raises an error other than MemoryError or RecursionError."""
    try:
        return compute()
    except (MemoryError, RecursionError):
        raise
    # on nonsense sympy raises all kinds of errors, and its LaTeX parser plain Exceptions
    except Exception:
        return None


def _compare(first: Basic | MatrixBase, second: Basic | MatrixBase, gold: str, answer: str) -> bool:
    """first, second: the parsed gold and answer."""
    for known in (
        _exactly_equal(first, second),
        _rounds_to(second, gold, True),
        _rounds_to(first, answer),
    ):
        if known is not None:
            return known

    if _differ_at_a_point(first, second):
        return False
    return bool(math_verify.verify([first], [second], timeout_seconds=None, raise_on_error=True))


def _divides_by_zero(side: Basic | MatrixBase) -> bool:
    """Whether a part of it has no value; a comparison with it may never end."""
    powers = side.atoms(Pow)
    return bool(side.has(nan, zoo)) or any(
        power.base == 0 and not power.exp.is_positive for power in powers
    )


def _is_endless(side: Basic | MatrixBase) -> bool:
    r"""Whether it cannot be evaluated even alone, e.g. `\sum_{k=\pi}^{3/2} k`: then it is not an
    answer."""

    def evaluate() -> None:
        side.doit().evalf()
        side.xreplace(_point(side.free_symbols)).evalf()

    try:
        _attempt(evaluate)
    except RecursionError:
        return True
    return False


@lru_cache(maxsize=1024)
def _parse(text: str) -> Basic | MatrixBase | None:
    """LaTeX as a sympy expression, with i as the imaginary unit and ° as π/180 in functions; None
    if it is not a formula."""
    inner = unwrap(text)
    if words(inner) is None:
        text = inner
    parsed = _attempt(lambda: _to_sympy(text))
    if isinstance(parsed, Basic | MatrixBase):
        return parsed
    return None


def _to_sympy(text: str) -> object:
    degrees = _TRIGONOMETRY.search(text) is not None
    syntax = normalize_latex(text, _SYNTAX)
    parsed = latex2sympy(syntax, is_real=True, convert_degrees=degrees, normalization_config=None)
    if isinstance(parsed, Basic) and not parsed.free_symbols.isdisjoint(_IMAGINARY):
        return parsed.xreplace(dict.fromkeys(_IMAGINARY, I))
    return parsed


def _exactly_equal(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool | None:
    """Whether rational numbers in any notation are equal: `2^{2017}` is not `2^{2017}-1`. None for
    anything else."""
    if not all(
        isinstance(side, Expr) and not side.free_symbols and not side.has(Float)
        for side in (gold, answer)
    ):
        return None

    values = [side.doit() for side in (gold, answer)]
    if all(value.is_Rational for value in values):
        return bool(values[0] == values[1])
    return None


def _differ_at_a_point(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """True for two formulas with different values at one point, which is found much faster than by
    simplifying."""
    if not all(isinstance(side, Expr) and not side.has(*_NOT_POINTWISE) for side in (gold, answer)):
        return False

    point = _point(gold.free_symbols | answer.free_symbols)
    if isinstance(gold, Symbol) or isinstance(answer, Symbol):  # a symbol may be a word
        return False

    try:
        first, second = (complex(side.xreplace(point).evalf()) for side in (gold, answer))
    except (TypeError, ValueError, ArithmeticError):  # not a number, or too large for a float
        return False

    gap = abs(first - second)
    size = max(abs(first), abs(second))
    return math.isfinite(gap) and gap > _SMALL_GAP + _RELATIVE_TOLERANCE * size


def _point(symbols: Iterable[Basic]) -> dict[Basic, Float]:
    return {
        symbol: Float(0.7 + 0.37 * number) for number, symbol in enumerate(sorted(symbols, key=str))
    }


def _rounds_to(expression: Basic | MatrixBase, text: str, may_be_cut: bool = False) -> bool | None:
    """Whether a number equals a plain decimal, exactly or rounded (`_is_rounded`); None if
    unknown."""
    decimal = plain_number(text)
    if decimal is None or not isinstance(expression, Expr) or expression.free_symbols:
        return None

    value = expression.doit()
    if not value.is_real:
        return None

    exact = Decimal(str(value.evalf(num_decimals(decimal) + 20)))
    if value.is_Rational and Fraction(decimal) == Fraction(int(value.p), int(value.q)):
        return True
    if not value.is_Rational and num_decimals(decimal) < ROUNDED_DECIMALS:
        return None

    return _is_rounded(exact, decimal, may_be_cut)


_INTEGER = r"[-+]?\s*\d+"
_OF_FRACTION = rf"\s*(?:\{{\s*{_INTEGER}\s*\}}|\d)"
_FRACTION = rf"\\frac{_OF_FRACTION}{_OF_FRACTION}"
_DECIMAL = r"(?:\d{1,3}(?:(?:,|\s*\{,\s*\}\s*)\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER_OF_TEN = rf"10\s*\^\s*(?:\{{\s*{_INTEGER}\s*\}}|\d+)"
_SIGNED_NUMBER = (
    rf"[-+]?\s*(?:(?:(?:\d+(?:\\?\s)*)?{_FRACTION}|\d+\s*/\s*\d+|{_DECIMAL})(?:\s*(?:\\cdot|\\times|\*)\s*{_POWER_OF_TEN})?"
    rf"|{_POWER_OF_TEN})"
)
_NUMBER = re.compile(rf"\s*(?:{_SIGNED_NUMBER}|[(\[]\s*{_SIGNED_NUMBER}\s*[)\]])\s*", re.ASCII)

_DIVISION = re.compile(
    r"[-+]?\s*(?:\\frac\s*\{\s*[-+]?(\d+)\s*\}\s*\{\s*[-+]?(\d+)\s*\}|(\d+)\s*/\s*(\d+))"
)
_LARGE = 20
_ROUNDED = re.compile(rf"\.\d{{{ROUNDED_DECIMALS}}}")
_COMMAND = re.compile(r"\\([A-Za-z]+)(?:\{[a-z]*matrix\}|\{array\}(?:\{[lcr|]*\})?)?")
_ELEMENTARY = frozenset(
    re.findall("[a-z]+", "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log")
)
_SETS = frozenset(("cup", "cap", "setminus"))
_NOTATION = frozenset(
    re.findall(
        "[A-Za-z]+",
        "frac sqrt pi cdot times infty emptyset mathbb begin end circ exp alpha beta gamma delta "
        "epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
        "varphi chi psi omega Delta Theta Lambda Xi Phi Psi Omega",
    )
)
_CONSTANTS = re.compile(
    r"[ei]|\\(?:pi|circ|infty|frac|sqrt|cdot|times|begin|end|exp|ln|log|[a-z]*(?:sin|cos|tan))"
)
_UNUSUAL = re.compile(r"[^\w\s+\-*/^(){}\[\],.=\\|&<>]|[^\x00-\x7f]|\\frac\{d[^{}]*\}\{d[a-z]\}")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|neq)(?![A-Za-z])")
_SPACED = re.compile(r"\s*([-+*/^_(){}|=])\s*")
_TIMES = re.compile(r"\\(?:cdot|times)(?![A-Za-z])")
_LITERAL = r"(?:\\frac(?:\{\d+\}|\d){2}|\d+(?:\.\d+)?(?:/\d+)?)"
_ARITHMETIC = re.compile(
    rf"(?<![\w.^)}}*/\]]){_LITERAL}[+-]{_LITERAL}(?!\s*[\w.^\\(!*/])"
    rf"|(?<![\d.^_]){_LITERAL}(?:\*{_LITERAL}|\({_LITERAL}\))(?![\d.^!])|\({_LITERAL}\)\({_LITERAL}\)|\d!"
)
_ROOT = re.compile(r"\\sqrt(?:\{(\d{1,15})\}|(\d))")
_BINARY = re.compile(r"(?<=[\w)}\]!])[+-]")
_OPERATORS = (
    _BINARY,
    re.compile(r"\\sqrt|(?<!\b10)\^(?!\s*\{?\\circ)"),
    re.compile(r"!"),
    re.compile(r"\|"),
    re.compile(r"\\begin"),
)


def is_number(text: str) -> bool:
    r"""Whether it is a decimal, a fraction of integers, a mixed number, or one of these times a
    power of ten."""
    return _NUMBER.fullmatch(unwrap(text)) is not None


def has_form_of(gold: str, answer: str) -> bool:
    """Whether the answer states a value as the ground truth does, regardless of the value.

    A number always does. Formulas with variables may be expanded, factored and reordered.
    """
    if is_number(answer) or (is_number(gold) and not _ROUNDED.search(gold)):
        return is_number(answer) and not _is_division(gold, answer)

    gold = r"\pi\sqrt{2}" if is_number(gold) else _plain(gold)
    answer = _plain(answer)
    found = _commands(gold)
    known = (_NOTATION | found).union(
        *(family for family in (_ELEMENTARY, _SETS) if family & found)
    )
    if _RELATION.search(answer) and not _RELATION.search(gold):
        return False
    if _commands(answer) - known or set(_UNUSUAL.findall(answer)) - set(_UNUSUAL.findall(gold)):
        return False
    if _computations(answer) > _computations(gold):
        return False
    if found & _ELEMENTARY or re.search(
        r"[A-Za-z]", _CONSTANTS.sub("", _COMMAND.sub(r"\\\1", gold))
    ):
        return True

    spare = Counter({_BINARY: int("e^" in gold)})  # e^{ix} as a + bi
    return all(
        len(kind.findall(answer)) <= len(kind.findall(gold)) + spare[kind] for kind in _OPERATORS
    )


def _is_division(gold: str, answer: str) -> bool:
    """Whether it is a division still to be computed, like 936/12 for 78, and no fraction: 7/2,
    14/2, 250/100."""
    found = _DIVISION.fullmatch(unwrap(answer).strip("()[] "))
    if found is None or plain_number(gold) is None:
        return False

    above, below = (int(number) for number in found.groups() if number)
    is_decimal = False
    if below:
        is_decimal = above % below > 0 and str(below).strip("0") == "1"

    return above >= _LARGE and above > below and math.gcd(above, below) > 1 and not is_decimal


def _plain(text: str) -> str:
    return _SPACED.sub(
        r"\1", _TIMES.sub("*", unwrap(text).replace(r"\exp(1)", "e").replace(r"\exp", "e^"))
    )


def _commands(text: str) -> set[str]:
    return {match[1] for match in _COMMAND.finditer(_RELATION.sub("", text))}


def _computations(text: str) -> int:
    """The number of uncomputed operations on two numbers, or roots of squares."""
    count = len(_ARITHMETIC.findall(text))
    for short, braced in _ROOT.findall(text):
        number = int(short or braced)
        count += math.isqrt(number) ** 2 == number
    return count
