"""Answers as text: normalisation of notations, and splitting of lists at the top level; and units
after a number:
`5 \text{ cm}`, `5 cm^2`, `5 km/h`, `50\%`, `5 apples`.

Answers in different units are different, unless the quantities are equal: 100 cm = 1 m. A number
without a unit equals the same number with any unit.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from distflow.rewards.extracted_answers import unboxed, without_markup

MAX_RAW_CHARACTERS = 2_000

_TABLE = tomllib.loads(Path(__file__).with_name("notation.toml").read_text("utf-8"))
_SCALES, _PARTS = _TABLE["scales"], {**_TABLE["parts"], "SCALES": "|".join(_TABLE["scales"])}
_TEXT = _PARTS["TEXT"]
_SUPERSCRIPTS = _PARTS["SUPERSCRIPTS"]
_FULL_WIDTH = {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # as beside Chinese
_SYMBOLS = str.maketrans(_TABLE["symbols"] | _FULL_WIDTH)
_FROM_SUPERSCRIPT = str.maketrans(_SUPERSCRIPTS, "0123456789-")


def _as_integer(match: re.Match[str]) -> str:
    """A number without thousands separators; commas stay if there are brackets, in which they may
    separate items."""
    number = re.sub("[_']", "", match[0])
    if re.search(r"[(\[]|\\\{", match.string):
        return number
    return number.replace(",", "")


def _as_fraction(match: re.Match[str]) -> str:
    whole = match[1] or "0"
    fixed = match[2]
    repeating = match[3] or match[4]
    without = int(whole + fixed)
    denominator = 10 ** len(fixed) * (10 ** len(repeating) - 1)
    return rf"\frac{{{without * (10 ** len(repeating) - 1) + int(repeating)}}}{{{denominator}}}"


def _as_improper(match: re.Match[str]) -> str:
    """`4 4/9` as a fraction; `4 9/4` and `4 4/0` are not numbers and stay unchanged."""
    whole, numerator, denominator = (int(part) for part in match.groups())
    if len(match[0]) > 300 or numerator >= denominator:
        return match[0]
    value = whole + Fraction(numerator, denominator)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_REWRITES: dict[str, Callable[[re.Match[str]], str]] = {
    "<superscript>": lambda match: f"^{{{match[0].translate(_FROM_SUPERSCRIPT)}}}",
    "<integer>": _as_integer,
    "<currency>": lambda match: rf"{match[1]}{match[3]} \text{{{_TABLE['currencies'][match[2]]}}}",
    "<fraction>": _as_fraction,
    "<scale>": lambda match: rf" \cdot 10^{{{_SCALES[match[1].lower()]}}} ",
    "<improper>": _as_improper,
    "<remark>": lambda match: _remark(match),
}
_PART = re.compile(f"<({'|'.join(_PARTS)})>")
_RULES = [
    (
        re.compile(_PART.sub(lambda name: _PARTS[name[1]], pattern), re.ASCII),
        _REWRITES.get(replacement, replacement),
    )
    for pattern, replacement in _TABLE["rules"]
]
TEXT = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_REMARK = re.compile(r"(?<=[\d%})\]$°π])(?:\s|\\[ ,;:])+([(\[])([^()\[\]\n]*)[)\]]")
_FORMULA = re.compile(
    r"\s*((?:or|i\.?e\.?,?|that is,?)\s)?\s*([=≈~]?)\s*("
    r"[\d\s.+*/×÷%^=-]*\d[\d\s.+*/×÷%^=-]*)"
)
_WORDS = re.compile(r"(?<![A-Za-z\\])(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)\b)[A-Za-z]{2,}")
_NO_REMARK = re.compile(
    (
        r"(?:in "
        r")?base\b|mod|(?:or|and|to|no)\b|not(?!\s+\$?-?\d)|wrong|incorrect|false|may|perhaps|plus|minus|times|over"
    ),
    re.I,
)
_LETTERS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_PUNCTUATION = re.compile(r"""[\s()\[\].,;:!?'"~-]+""")
_WORD = re.compile(r"[^\W\d_]{4}|[A-Z][a-z]|[A-Z]{3}")
_OPENED = ("(", "[", r"\{", r"\langle")
_CLOSED = (")", "]", r"\}", r"\rangle")
_TOP_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_AND_OR = re.compile(
    rf",?\s*(?:{_TEXT}\s*\{{\s*(?:and|or)\s*\}}|\b(?:and|or)\b|\\(?:lor|vee|land|wedge)(?![A-Za-z]))\s*"
)


def normalise(answer: str) -> str:
    """Without delimiters, currency signs, trailing punctuation and thin spaces in numbers; `1e2` as
    a power of ten.

    A text of more than `MAX_RAW_CHARACTERS` is not an answer and is returned unchanged.
    """
    answer = answer.strip()
    if len(answer) > MAX_RAW_CHARACTERS:
        return answer

    answer = without_markup(unboxed(answer)).translate(_SYMBOLS)
    for pattern, replacement in _RULES:
        answer = pattern.sub(replacement, answer).strip()
    return answer


def without_remarks(text: str) -> str:
    """The text without a remark in brackets after a value, like `7 (seven)` or `18 (9 + 9)`. A unit
    there is kept, and so is what changes or doubts the value."""
    return _REMARK.sub(
        lambda match: (
            "" if (found := _FORMULA.fullmatch(match[2])) and not found[1] else _remark(match)
        ),
        text,
    )


def _remark(match: re.Match[str]) -> str:
    """The remark in an answer: a formula must have the same value, so that `18 (9 + 9)` becomes
    `18 = 9 + 9`."""
    remark = match[2].strip()
    if found := _FORMULA.fullmatch(remark):
        return f" {found[2] or '='} {found[3]}"

    first, *others = _WORDS.findall(remark)[:2] or [""]
    is_plural = not others and first.endswith("s") and first.lower() not in _NO_UNITS
    if is_unit(remark) or is_plural or first.lower() in _MULTIPLES:
        return f" {remark}"
    if first and not _NO_REMARK.match(remark):
        return ""

    return match[0]


def words(text: str) -> str | None:
    r"""The letters in lower case, if the text has only letters and punctuation: `\text{(A)}` is
    `a`; else None."""
    plain = _PUNCTUATION.sub(" ", TEXT.sub(r" \1 ", text)).strip()
    return plain.casefold() if _LETTERS.fullmatch(plain) else None


def is_prose(text: str) -> bool:
    r"""True for `\text{...}` and words, in which the order of letters matters, unlike in a product
    of variables."""
    return bool(TEXT.search(text) or _WORD.search(text))


def unwrap(text: str) -> str:
    r"""The text with each `\text{...}` replaced by its content."""
    return TEXT.sub(r" \1 ", text).strip()


def split_top(text: str, separator: str) -> list[str]:
    """The parts between separators that are outside of brackets."""
    parts = [""]
    depth = 0
    for token in _TOP_TOKEN.findall(text):
        depth += (token in _OPENED or token == "{") - (token in _CLOSED or token == "}")
        if depth == 0 and token in separator:
            parts.append("")
        else:
            parts[-1] += token

    return [part.strip() for part in parts]


def listed(text: str) -> tuple[str, str, list[str]] | None:
    r"""A list, tuple, set or interval as (opening bracket or '', closing bracket or '', items);
    None for other text."""
    opening = next((bracket for bracket in _OPENED if text.startswith(bracket)), "")
    closing = next((bracket for bracket in _CLOSED if text.endswith(bracket)), "")

    inner = text[len(opening) : len(text) - len(closing)]
    if opening and closing and _is_balanced(inner):
        items = split_top(inner, ",;")
        if len(items) > 1 or opening == r"\{":
            return (opening, closing, items)
        return None

    items = split_top(_AND_OR.sub(",", text), ",;")
    return ("", "", items) if len(items) > 1 else None


def _is_balanced(text: str) -> bool:
    """Whether no bracket is closed before it is opened; any kind may close any other, as in the
    interval `[2,5)`."""
    depth = 0
    for token in _TOP_TOKEN.findall(text):
        depth += (token in _OPENED) - (token in _CLOSED)
        if depth < 0:
            return False
    return depth == 0


_UNITS = tomllib.loads(Path(__file__).with_name("units.toml").read_text("utf-8"))


def _read_sizes() -> Iterator[tuple[str, tuple[str, str]]]:
    """Names of units, each with its dimension and size."""
    for dimension, units in _UNITS["sizes"].items():
        for names, size in units.items():
            for name in names.split():
                yield name, (dimension, size)


_NAMES = dict(_read_sizes())
_NO_UNITS, _PLURALS = (frozenset(_UNITS[name].split()) for name in ("no_units", "plurals"))
_MULTIPLES = frozenset((*_SCALES, "squared", "cubed", "factorial"))
_TAIL = re.compile(
    r"(?P<value>.*?[^\s\\])(?P<tail>(?:(?<![A-Za-z])|(?![A-Za-z]))(?!\^\s*\{?-?\d)(?:"
    + TEXT.pattern
    + r"|\\[,;: ]|\\?%|\\cdot(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])|\^\s*\{?-?\d\}?|[A-Za-z/\s~.])+)"
)
_UNIT_PART = re.compile(r"(/)?\s*([A-Za-z]+)\s*(?:\^\s*\{?(-?\d)\}?)?\s*")
_FUNCTION = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|lim|operatorname|text)(?![A-Za-z])"
)
_PLAIN_VALUE = re.compile(
    r"(?:[\d.,+\-*/(){}^\s=]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z])|^[A-Za-z]\s*=)+"
)
_NEVER_VARIABLES = frozenset(("cm", "km", "mm", "kg", "ft", "hz", "kw"))  # of up to two letters


@dataclass(frozen=True)
class Unit:
    """What a number counts."""

    dimensions: tuple[tuple[str, int], ...]
    """Powers of dimensions, by name."""
    size: Fraction
    """In base units, except for the factor 180/π of a radian."""
    is_radian: bool = False
    is_plain: bool = True
    """It is known or a plural word, so a number with it may be compared with a bare number."""


NUMBER = Unit((), Fraction(1))
RADIAN = Unit((("angle", 1),), Fraction(1), is_radian=True)
UNCHANGED = r"\frac{1}{1}"


def split_unit(text: str, is_measured: bool = False) -> tuple[str, Unit | None]:
    """The value and its unit; the text and None if it has no unit at its end.

    is_measured: the text is compared with a number or a quantity, so that a letter right after a
    number is a unit: `5m`. Otherwise it may be a variable.
    """
    found = _TAIL.fullmatch(text)
    if found is None:
        return text, None

    value = found["value"].strip()
    tail = found["tail"]
    is_apart = TEXT.search(tail) is not None or tail[0].isspace()
    spelled = _spelled(tail)
    unit = _unit(
        spelled,
        may_be_unknown=is_apart and bool(TEXT.search(tail) or _PLAIN_VALUE.fullmatch(value)),
    )
    if unit is None or _FUNCTION.search(value):
        return text, None

    is_short = any(
        len(name) < 3 and name.lower() not in _NEVER_VARIABLES
        for name in re.findall("[A-Za-z]+", spelled)
    )
    if (
        is_short
        and not TEXT.search(tail)
        and not (_PLAIN_VALUE.fullmatch(value) and (is_apart or is_measured))
    ):
        return text, None

    return value, unit


def conversion(gold: Unit, unit: Unit) -> str | None:
    """The factor, in LaTeX, that converts a value in `unit` to `gold`; None if their dimensions
    differ."""
    if gold.dimensions != unit.dimensions:
        return None

    ratio = unit.size / gold.size
    pi = {(False, True): r" \cdot \frac{180}{\pi}", (True, False): r" \cdot \frac{\pi}{180}"}
    return rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}" + pi.get(
        (gold.is_radian, unit.is_radian), ""
    )


def is_unit(word: str) -> bool:
    """Whether a word or sign after a number is a known unit, or changes the number's value as
    "thousand" does."""
    parts = _UNIT_PART.findall(_spelled(word))
    return word.strip().lower() in _MULTIPLES or (
        bool(parts) and all(_known(name) for _, name, _ in parts)
    )


def _spelled(tail: str) -> str:
    tail = TEXT.sub(r" \1 ", tail)
    for pattern, replacement in _UNITS["spelled"]:
        tail = re.sub(pattern, replacement, tail)
    return re.sub(r"\s+", " ", tail.replace(".", " ")).strip()


def _unit(spelled: str, may_be_unknown: bool) -> Unit | None:
    """A unit from its spelling. An unknown word is its own dimension: apples are apples."""
    parts = list(_UNIT_PART.finditer(spelled))
    if not parts or sum(len(part.group()) for part in parts) != len(spelled):
        return None

    powers: dict[str, int] = {}
    size = Fraction(1)
    is_radian = False
    is_below = False
    unknown = [part[2].lower() for part in parts if _known(part[2]) is None]
    is_plain = not unknown or any(name in _PLURALS or name.endswith("s") for name in unknown)

    for slash, name, power in (part.groups() for part in parts):
        is_below = is_below or bool(slash)
        exponent = int(power or 1) * (-1 if is_below else 1)
        dimension, factor = _known(name) or (name.lower().removesuffix("s"), "")
        is_word = len(name) > 2 and _NO_UNITS.isdisjoint(
            (name.lower(), name.lower().removesuffix("s"))
        )
        if not factor and not (may_be_unknown and is_word):
            return None

        is_radian = is_radian or "pi" in factor
        size *= Fraction(1 if "pi" in factor else factor or 1) ** exponent
        powers[dimension] = powers.get(dimension, 0) + exponent

    dimensions = sorted(
        (name, power) for name, power in powers.items() if power and name != "number"
    )
    return Unit(tuple(dimensions), size, is_radian, is_plain)


def _known(name: str) -> tuple[str, str] | None:
    if len(name) == 1:
        if name in "mgshlLJWNCVA":
            return _NAMES.get(name.lower())
        return None

    name = name.lower()
    singulars = (
        name,
        name.removesuffix("s"),
        name.removesuffix("es"),
        name.removesuffix("ies") + "y",
    )

    return next(
        (_NAMES[singular] for singular in singulars if len(singular) > 1 and singular in _NAMES),
        None,
    )
