r"""Units after a number: `5 \text{ cm}`, `5 cm^2`, `5 km/h`, `50\%`, `5 apples`.

Answers in different units are different, unless the quantities are equal: 100 cm = 1 m. A number without a unit equals
the same number with any unit.
"""

import re
import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from distflow.rewards.math.text import TEXT

_TABLE = tomllib.loads(Path(__file__).with_name("units.toml").read_text("utf-8"))
_NAMES = {
    name: (dimension, size)
    for dimension, units in _TABLE["sizes"].items()
    for names, size in units.items()
    for name in names.split()
}
_NO_UNITS, _PLURALS = (frozenset(_TABLE[name].split()) for name in ("no_units", "plurals"))
_TAIL = re.compile(
    r"(?P<value>.*?[^\s\\])(?P<tail>(?:(?<![A-Za-z])|(?![A-Za-z]))(?!\^\s*\{?-?\d)(?:"
    + TEXT.pattern
    + r"|\\[,;: ]|\\?%|\\cdot(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])|\^\s*\{?-?\d\}?|[A-Za-z/\s~.])+)"
)
_PART = re.compile(r"(/)?\s*([A-Za-z]+)\s*(?:\^\s*\{?(-?\d)\}?)?\s*")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|lim|operatorname|text)(?![A-Za-z])")
_PLAIN_VALUE = re.compile(r"(?:[\d.,+\-*/(){}^\s=]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z])|^[A-Za-z]\s*=)+")
_NEVER_VARIABLES = frozenset(("cm", "km", "mm", "kg", "ft", "hz", "kw"))  # of up to two letters


@dataclass(frozen=True)
class Unit:
    """Powers of dimensions by name, and the size in base units, apart from the factor 180/π of a radian. is_plain: it
    is known or a word in the plural, so that a number with it may be compared with a bare number."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    is_radian: bool = False
    is_plain: bool = True


NUMBER = Unit((), Fraction(1))
RADIAN = Unit((("angle", 1),), Fraction(1), is_radian=True)
UNCHANGED = r"\frac{1}{1}"


def split_unit(text: str, is_measured: bool = False) -> tuple[str, Unit | None]:
    """The value and its unit; the text and None if it has no unit at its end.

    is_measured: the text is compared with a number or a quantity, so that a letter right after a number is a unit:
    `5m`. Otherwise it may be a variable.
    """
    found = _TAIL.fullmatch(text)
    if found is None:
        return text, None
    value, tail = found["value"].strip(), found["tail"]
    is_apart = TEXT.search(tail) is not None or tail[0].isspace()
    spelled = _spelled(tail)
    unit = _unit(spelled, may_be_unknown=is_apart and bool(TEXT.search(tail) or _PLAIN_VALUE.fullmatch(value)))
    if unit is None or _FUNCTION.search(value):
        return text, None
    is_short = any(len(name) < 3 and name.lower() not in _NEVER_VARIABLES for name in re.findall("[A-Za-z]+", spelled))
    if is_short and not TEXT.search(tail) and not (_PLAIN_VALUE.fullmatch(value) and (is_apart or is_measured)):
        return text, None
    return value, unit


def conversion(gold: Unit, unit: Unit) -> str | None:
    """The factor, in LaTeX, that converts a value in `unit` to `gold`; None if their dimensions differ."""
    if gold.dimensions != unit.dimensions:
        return None
    ratio = unit.size / gold.size
    pi = {(False, True): r" \cdot \frac{180}{\pi}", (True, False): r" \cdot \frac{\pi}{180}"}
    return rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}" + pi.get((gold.is_radian, unit.is_radian), "")


def is_unit(word: str) -> bool:
    """Whether a word or sign after a number is a known unit."""
    parts = _PART.findall(_spelled(word))
    return bool(parts) and all(_known(name) for _, name, _ in parts)


def _spelled(tail: str) -> str:
    tail = TEXT.sub(r" \1 ", tail)
    for pattern, replacement in _TABLE["spelled"]:
        tail = re.sub(pattern, replacement, tail)
    return re.sub(r"\s+", " ", tail.replace(".", " ")).strip()


def _unit(spelled: str, may_be_unknown: bool) -> Unit | None:
    """An unknown word is a dimension of its own: apples are apples."""
    parts = list(_PART.finditer(spelled))
    if not parts or sum(len(part.group()) for part in parts) != len(spelled):
        return None
    powers: dict[str, int] = {}
    size, is_radian, is_below = Fraction(1), False, False
    unknown = [part[2].lower() for part in parts if _known(part[2]) is None]
    is_plain = not unknown or any(name in _PLURALS or name.endswith("s") for name in unknown)
    for slash, name, power in (part.groups() for part in parts):
        is_below = is_below or bool(slash)
        exponent = int(power or 1) * (-1 if is_below else 1)
        dimension, factor = _known(name) or (name.lower().removesuffix("s"), "")
        is_word = len(name) > 2 and _NO_UNITS.isdisjoint((name.lower(), name.lower().removesuffix("s")))
        if not factor and not (may_be_unknown and is_word):
            return None
        is_radian = is_radian or "pi" in factor
        size *= Fraction(1 if "pi" in factor else factor or 1) ** exponent
        powers[dimension] = powers.get(dimension, 0) + exponent
    dimensions = sorted((name, power) for name, power in powers.items() if power and name != "number")
    return Unit(tuple(dimensions), size, is_radian, is_plain)


def _known(name: str) -> tuple[str, str] | None:
    if len(name) == 1:
        return _NAMES.get(name.lower()) if name in "mgshlLJWNCVA" else None
    name = name.lower()
    singulars = (name, name.removesuffix("s"), name.removesuffix("es"), name.removesuffix("ies") + "y")
    return next((_NAMES[singular] for singular in singulars if len(singular) > 1 and singular in _NAMES), None)
