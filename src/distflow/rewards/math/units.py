r"""Units after a number: `5 \text{ cm}`, `5 cm^2`, `5 km/h`, `50\%`, `5 apples`.

Answers in different units are different, unless the quantities are equal: 100 cm = 1 m. A number without a unit equals
the same number with any unit.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from distflow.rewards.math.text import TEXT

# dimension: {names of a unit: its size in the base unit}. Plurals are looked up by their singular.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1", "km kilometer kilometre": "1000", "cm centimeter centimetre": "1/100",
        "mm millimeter millimetre": "1/1000", "dm decimeter decimetre": "1/10", "nm nanometer": "1/1000000000",
        "in inch": "127/5000", "ft foot feet": "381/1250", "yd yard": "1143/1250", "mi mile": "201168/125",
    },
    "mass": {
        "g gram gm": "1", "kg kilogram kilo": "1000", "mg milligram": "1/1000", "ton tonne": "1000000",
        "lb pound": "45359237/100000", "oz ounce": "45359237/1600000",
    },
    "time": {
        "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800",
        "ms millisecond": "1/1000",
    },
    "calendar": {"month": "1", "year yr": "12", "decade": "120", "century": "1200"},
    "volume": {"l liter litre": "1", "ml milliliter millilitre": "1/1000", "gallon gal": "1", "quart qt": "1/4",
               "pint": "1/8", "cup": "1/16"},
    "angle": {"degree deg": "1", "rad radian": r"\frac{180}{\pi}"},
    "dollar": {"dollar usd buck": "1", "cent": "1/100"},
    "number": {"percent percentage pct": "1/100", "dozen": "12"},
    "temperature": {"kelvin": "1"}, "celsius": {"celsius": "1"}, "fahrenheit": {"fahrenheit": "1"},
    "energy": {"j joule": "1", "kj kilojoule": "1000"}, "power": {"w watt": "1", "kw kilowatt": "1000"},
    "force": {"n newton": "1"}, "charge": {"c coulomb": "1"}, "voltage": {"v volt": "1"},
    "current": {"a ampere amp": "1"},
    "frequency": {"hz hertz": "1"}, "pressure": {"pa pascal": "1"}, "amount": {"mol mole": "1"},
}  # fmt: skip
_US_VOLUMES = ("gallon", "gal", "quart", "qt", "pint", "cup")
_NAMES = {
    name: ("us volume" if name in _US_VOLUMES else dimension, size)
    for dimension, units in _TABLE.items()
    for names, size in units.items()
    for name in names.split()
}
_SPELLED = (
    (r"\\?%", " percent "),
    (r"\^\s*\\circ\s*(?:\\text\{)?\s*C\b\}?", " celsius "),
    (r"\^\s*\\circ\s*(?:\\text\{)?\s*F\b\}?", " fahrenheit "),
    (r"\^\s*\\circ", " degree "),
    (r"\bdegrees? (celsius|fahrenheit)", r" \1 "),
    (r"\bmph\b", " mile/hour "),
    (r"\bk(?:m|p|mp)h\b", " km/hour "),
    (r"\b(?:square|sq\.?) ([A-Za-z]+)", r" \1^2 "),
    (r"\b(?:cubic|cu\.?) ([A-Za-z]+)", r" \1^3 "),
    (r"\b([A-Za-z]+) squared\b", r" \1^2 "),
    (r"\b([A-Za-z]+) cubed\b", r" \1^3 "),
    (r"\bper\b", "/"),
    (r"\\cdot|\\times|\\[,;: ]|~|\*", " "),
)
_TAIL = re.compile(
    r"(?P<value>.*?[^\s\\])(?P<tail>(?:(?<![A-Za-z])|(?![A-Za-z]))(?!\^\s*\{?-?\d)(?:"
    + TEXT.pattern
    + r"|\\[,;: ]|\\?%|\\cdot(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])|\^\s*\{?-?\d\}?|[A-Za-z/\s~.])+)"
)
_PART = re.compile(r"(/)?\s*([A-Za-z]+)\s*(?:\^\s*\{?(-?\d)\}?)?\s*")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|lim|operatorname|text)(?![A-Za-z])")
_PLAIN_VALUE = re.compile(r"(?:[\d.,+\-*/(){}^\s=]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z])|^[A-Za-z]\s*=)+")
_NO_UNITS = frozenset(  # words that change the number
    ("or", "and", "not", "to", "no", "than", "less", "least", "most", "if", "mod", "modulo", "base", "minus", "plus")
    + ("below", "under", "above", "squared", "cubed", "factorial", "half", "halve", "third", "fourth", "fifth")
    + ("tenth", "hundredth", "thousandth", "is", "was", "this", "thus", "yes", "perhaps", "always", "sometimes")
)
_PLURALS = frozenset(  # without an s
    ("people", "men", "women", "children", "mice", "geese", "teeth", "sheep", "fish", "deer", "yuan", "yen", "won")
    + ("total", "each", "altogether", "apiece", "remaining", "left", "old", "tall", "long", "wide", "high", "deep")
)
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
    for pattern, replacement in _SPELLED:
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
