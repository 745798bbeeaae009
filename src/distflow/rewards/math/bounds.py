r"""Bounds on the cost of comparing an answer, checked before evaluation, since the policy writes the answer.

A number like `9^{9^{9}}` or `\binom{10^9}{10^8}` would take all time and memory.
"""

import math
import re

MAX_CHARACTERS = 1_000
MAX_DEPTH = 10
MAX_BITS = 30_000

_TOKEN = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\\[A-Za-z]+|\\.|\S", re.ASCII | re.DOTALL)
_OPENING, _CLOSING = ("{", "(", "[", r"\{"), ("}", ")", "]", r"\}")
_VALUES = frozenset((r"\pi", r"\infty", r"\tau", r"\phi", r"\varphi"))
_REPEATED = frozenset((r"\sum", r"\prod"))
_FACTORIALS = frozenset((r"\binom", r"\dbinom", r"\tbinom", r"\Gamma", r"\gamma"))
_EXPONENTIALS = frozenset((r"\exp", r"\sinh", r"\cosh", r"\tanh"))
_FUNCTIONS = r"gcd|lcm|floor|ceil|sgn|Re|Im|a(?:rc?)?(?:sin|cos|tan|csc|sec|cot)h?"
_REFUSED = re.compile(r"\\choose|\\xrightarrow|\\operatorname\*?(?!\s*\{\s*(?:" + _FUNCTIONS + r")\s*\})")
_BITS_OF_A_LETTER = 2.0  # π and e are below 4


def is_affordable(answer: str) -> bool:
    """False for a text that is too long or too deep, or if its value may have more than `MAX_BITS` bits.

    The value is bounded from above as the text is read, e.g. bits(a^b) ≤ bits(a) · 2^bits(b).
    """
    if len(answer) > MAX_CHARACTERS or _REFUSED.search(answer):
        return False
    reader = _Reader(_TOKEN.findall(answer))
    return sum(reader.sequence() for _ in iter(reader.has_more, False)) <= MAX_BITS


class _Reader:
    """Reads tokens once, from left to right; each method returns an upper bound of log2 |value|, at least 0."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def has_more(self) -> bool:
        return self.position < len(self.tokens)

    def sequence(self) -> float:
        """Read up to and including a closing bracket: bits of a sum or a product are at most the sum of bits."""
        total = 0.0
        while self.has_more():
            if self.tokens[self.position] in _CLOSING:
                self.position += 1
                break
            total += self.powers()
        return total

    def powers(self) -> float:
        r"""One item with the powers, factorials and, for `\sum` and `\prod`, the bounds that follow it."""
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
        return _BITS_OF_A_LETTER if token in _VALUES or token.isalpha() else 0.0

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
    return math.log2(max(float(mantissa), 2.0)) if mantissa.isdigit() and digits < 16 else digits * math.log2(10)


def _power_of_two(bits: float) -> float:
    return 2.0**bits if bits < 64 else math.inf


def _factorial(bits: float) -> float:
    return _power_of_two(bits) * max(bits, 1.0)
