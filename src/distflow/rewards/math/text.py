r"""Answers as text: normalisation of notations, and splitting of lists at the top level."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from distflow.rewards.extracted_answers import unboxed

MAX_RAW_CHARACTERS = 2_000

_TABLE = tomllib.loads(Path(__file__).with_name("notation.toml").read_text("utf-8"))
_SCALES, _PARTS = _TABLE["scales"], {**_TABLE["parts"], "SCALES": "|".join(_TABLE["scales"])}
_TEXT, _SUPERSCRIPTS = _PARTS["TEXT"], _PARTS["SUPERSCRIPTS"]
_FULL_WIDTH = {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # as beside Chinese
_SYMBOLS = str.maketrans(_TABLE["symbols"] | _FULL_WIDTH)
_FROM_SUPERSCRIPT = str.maketrans(_SUPERSCRIPTS, "0123456789-")


def _as_integer(match: re.Match[str]) -> str:
    """Without thousands separators, unless there are brackets, in which commas may separate items."""
    return match[0] if re.search(r"[(\[]|\\\{", match.string) else match[0].replace(",", "")


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeating = match[1] or "0", match[2], match[3] or match[4]
    without = int(whole + fixed)
    denominator = 10 ** len(fixed) * (10 ** len(repeating) - 1)
    return rf"\frac{{{without * (10 ** len(repeating) - 1) + int(repeating)}}}{{{denominator}}}"


def _as_improper(match: re.Match[str]) -> str:
    """`4 4/9` as a fraction; `4 9/4` and `4 4/0` are not numbers and stay unchanged."""
    whole, numerator, denominator = (int(part) for part in match.groups())
    if len(match[0]) > 300 or numerator >= denominator:
        return match[0]
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


_REWRITES: dict[str, Callable[[re.Match[str]], str]] = {
    "<superscript>": lambda match: f"^{{{match[0].translate(_FROM_SUPERSCRIPT)}}}",
    "<integer>": _as_integer,
    "<currency>": lambda match: rf"{match[1]}{match[3]} \text{{{_TABLE['currencies'][match[2]]}}}",
    "<fraction>": _as_fraction,
    "<scale>": lambda match: rf" \cdot 10^{{{_SCALES[match[1].lower()]}}} ",
    "<improper>": _as_improper,
}
_PART = re.compile(f"<({'|'.join(_PARTS)})>")
_RULES = [
    (re.compile(_PART.sub(lambda name: _PARTS[name[1]], pattern), re.ASCII), _REWRITES.get(replacement, replacement))
    for pattern, replacement in _TABLE["rules"]
]
TEXT = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_LETTERS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_PUNCTUATION = re.compile(r"""[\s()\[\].,;:!?'"~-]+""")
_WORD = re.compile(r"[^\W\d_]{4}|[A-Z][a-z]|[A-Z]{3}")
_OPENED, _CLOSED = ("(", "[", r"\{", r"\langle"), (")", "]", r"\}", r"\rangle")
_TOP_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_AND_OR = re.compile(
    rf",?\s*(?:{_TEXT}\s*\{{\s*(?:and|or)\s*\}}|\b(?:and|or)\b|\\(?:lor|vee|land|wedge)(?![A-Za-z]))\s*"
)


def normalise(answer: str) -> str:
    """Without delimiters, currency signs, trailing punctuation and thin spaces in numbers; `1e2` as a power of ten.

    A text of more than `MAX_RAW_CHARACTERS` is not an answer and is returned unchanged.
    """
    answer = answer.strip()
    if len(answer) > MAX_RAW_CHARACTERS:
        return answer
    answer = unboxed(answer)
    answer = answer.translate(_SYMBOLS)
    for pattern, replacement in _RULES:
        answer = pattern.sub(replacement, answer).strip()
    return answer


def words(text: str) -> str | None:
    r"""The letters in lower case, if the text has only letters and punctuation: `\text{(A)}` is `a`; else None."""
    plain = _PUNCTUATION.sub(" ", TEXT.sub(r" \1 ", text)).strip()
    return plain.casefold() if _LETTERS.fullmatch(plain) else None


def is_prose(text: str) -> bool:
    r"""True for `\text{...}` and words, in which the order of letters matters, unlike in a product of variables."""
    return bool(TEXT.search(text) or _WORD.search(text))


def unwrap(text: str) -> str:
    r"""The text with the content of each `\text{...}` in its place."""
    return TEXT.sub(r" \1 ", text).strip()


def split_top(text: str, separator: str) -> list[str]:
    """The parts between separators that are outside of brackets."""
    parts, depth = [""], 0
    for token in _TOP_TOKEN.findall(text):
        depth += (token in _OPENED or token == "{") - (token in _CLOSED or token == "}")
        if depth == 0 and token in separator:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def listed(text: str) -> tuple[str, str, list[str]] | None:
    r"""A list, tuple, set or interval as (opening bracket or '', closing bracket or '', items); None if it is none."""
    opening = next((bracket for bracket in _OPENED if text.startswith(bracket)), "")
    closing = next((bracket for bracket in _CLOSED if text.endswith(bracket)), "")
    inner = text[len(opening) : len(text) - len(closing)]
    if opening and closing and _is_balanced(inner):
        items = split_top(inner, ",;")
        return (opening, closing, items) if len(items) > 1 or opening == r"\{" else None
    items = split_top(_AND_OR.sub(",", text), ",;")
    return ("", "", items) if len(items) > 1 else None


def _is_balanced(text: str) -> bool:
    """Whether no bracket is closed before it is opened; any kind may close any other, as in the interval `[2,5)`."""
    depth = 0
    for token in _TOP_TOKEN.findall(text):
        depth += (token in _OPENED) - (token in _CLOSED)
        if depth < 0:
            return False
    return depth == 0
