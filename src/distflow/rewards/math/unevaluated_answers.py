r"""Does an answer state a value, or only how to compute one?

A policy that copies the problem has the right value: `347 + 589` is 936. So a number is answered by a number, and any
other ground truth by an expression of its form: with no operators but its own, and for a constant with no more of them.
"""

import math
import re
from collections import Counter

from distflow.rewards.math.formula_equality import ROUNDED_DECIMALS
from distflow.rewards.math.text import unwrap

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

_ROUNDED = re.compile(rf"\.\d{{{ROUNDED_DECIMALS}}}")
_COMMAND = re.compile(r"\\([A-Za-z]+)(?:\{[a-z]*matrix\}|\{array\}(?:\{[lcr|]*\})?)?")
_ELEMENTARY = frozenset(re.findall("[a-z]+", "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log"))
_SETS = frozenset(("cup", "cap", "setminus"))
_NOTATION = frozenset(re.findall("[A-Za-z]+",
    "frac sqrt pi cdot times infty emptyset mathbb begin end circ exp "
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Delta Theta Lambda Xi Phi Psi Omega"
))  # fmt: skip
_CONSTANTS = re.compile(r"[ei]|\\(?:pi|circ|infty|frac|sqrt|cdot|times|begin|end|exp|ln|log|[a-z]*(?:sin|cos|tan))")
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
_OPERATORS = (_BINARY, re.compile(r"\\sqrt|(?<!\b10)\^(?!\s*\{?\\circ)"), re.compile(r"!"), re.compile(r"\|"),
              re.compile(r"\\begin"))  # fmt: skip


def is_number(text: str) -> bool:
    r"""Whether it is a decimal, a fraction of integers, a mixed number, or one of these times a power of ten."""
    return _NUMBER.fullmatch(unwrap(text)) is not None


def has_form_of(gold: str, answer: str) -> bool:
    """Whether the answer states a value as the ground truth does. Says nothing about the value.

    A number always does. Formulas with variables may be expanded, factored and reordered.
    """
    if is_number(answer) or (is_number(gold) and not _ROUNDED.search(gold)):
        return is_number(answer)
    gold, answer = r"\pi\sqrt{2}" if is_number(gold) else _plain(gold), _plain(answer)
    found = _commands(gold)
    known = (_NOTATION | found).union(*(family for family in (_ELEMENTARY, _SETS) if family & found))
    if _RELATION.search(answer) and not _RELATION.search(gold):
        return False
    if _commands(answer) - known or set(_UNUSUAL.findall(answer)) - set(_UNUSUAL.findall(gold)):
        return False
    if _computations(answer) > _computations(gold):
        return False
    if found & _ELEMENTARY or re.search(r"[A-Za-z]", _CONSTANTS.sub("", _COMMAND.sub(r"\\\1", gold))):
        return True
    spare = Counter({_BINARY: int("e^" in gold)})  # e^{ix} as a + bi
    return all(len(kind.findall(answer)) <= len(kind.findall(gold)) + spare[kind] for kind in _OPERATORS)


def _plain(text: str) -> str:
    return _SPACED.sub(r"\1", _TIMES.sub("*", unwrap(text)))


def _commands(text: str) -> set[str]:
    return {match[1] for match in _COMMAND.finditer(_RELATION.sub("", text))}


def _computations(text: str) -> int:
    """How often two numbers, or the root of a square, are left to be computed."""
    squares = sum(math.isqrt(int(a or b)) ** 2 == int(a or b) for a, b in _ROOT.findall(text))
    return len(_ARITHMETIC.findall(text)) + squares
