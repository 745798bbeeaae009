r"""Answers as text: normalisation of notations, and splitting of lists at the top level."""

import re
from collections.abc import Callable

from distflow.rewards.extracted_answers import unboxed

MAX_RAW_CHARACTERS = 2_000

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5, "crore": 7}
_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|hbox)"
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|ln|log|exp"
_VERBS = "is|are|was|were|has|have|had|equals?"
_CURRENCIES = {r"\$": "dollars", "€": "euros", "£": "pounds", "¥": "yen", "₹": "rupees"}
_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r" \times ", "·": r" \cdot ", "⋅": r" \cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
        "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "∪": r" \cup ", "∩": r" \cap ", "∈": r" \in ",
        "∅": r"\emptyset ", "±": r"\pm ", "ℝ": r"\mathbb{R}", "°": r"^\circ ",
        "\u2009": " ", "\u202f": " ", "\u00a0": " ", "≈": r"\approx ", "。": ".",
        **{chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)},  # full width, as beside Chinese
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    }
)  # fmt: skip
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_FROM_SUPERSCRIPT = str.maketrans(_SUPERSCRIPTS, "0123456789-")
_THIN_SPACE = r"(?:\\[,;:! ]|~|\\thinspace(?![A-Za-z])| )"


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


# (pattern, replacement), applied in this order.
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        (rf"[{_SUPERSCRIPTS}]+", lambda match: f"^{{{match[0].translate(_FROM_SUPERSCRIPT)}}}"),
        (r"(?<=[\w)}\]])\*\*(-?\d+|[A-Za-z])", r"^{\1}"),  # a power in Python notation; any other ** is bold print
        (r"(?<=[\w)}\]])\*\*(?=[({\\])", "^"),
        (r"\*\*", ""),
        (r"(?<=\d)\s*,\s*\\!\s*(?=\d{3}(?!\d))", ","),
        (r"\\(?:displaystyle|textstyle|left|right|[bB]igg?[lr]?|mleft|mright|limits)(?![A-Za-z])|\\!", ""),
        (r"\\(?:quad|qquad|thinspace|enspace|space|hspace\{[^{}]*\})(?![A-Za-z])", " "),
        (rf"(?<=\d){_THIN_SPACE}(?=\d{{3}}(?!\d))", ""),
        (r"\{,\}", ","),
        (r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", _as_integer),
        (r"\^-(\d+|[A-Za-z])", r"^{-\1}"),
        (r"(?:^|\{)([^{}\\]+)\\choose\s*([^{}\\]+)(?:$|\})", r"\\binom{\1}{\2}"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?=\s*[({{\\^_\d]|\s+[A-Za-z](?![A-Za-z]))", r"\\\1 "),
        (r"(?<![\\A-Za-z])(sec|csc)(?=\s*\(|\^)", r"\\\1 "),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?i)(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])|(?<![\\\w])oo(?!\w)", r"\\infty "),
        (rf"(?<=\d)\s*\^?\s*\{{?\s*(?:{_TEXT}\s*\{{\s*)?(?:st|nd|rd|th)\s*\}}{{0,2}}\s*\.?$", ""),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\^?\s*\\(?:degree|textdegree)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\sqrt\s*\[([3579])\]\s*\{-(\d+)\}", r"-\\sqrt[\1]{\2}"),  # the real root is meant
        (r"\\lg(?![A-Za-z])", r"\\log"),
        (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"(?<=[\d)])!=", "! ="),
        (r"\\neq?(?![A-Za-z])|!=|\\not\s*=", r"\\neq "),
        (r"\\([lr])brace(?![A-Za-z])", lambda match: r"\{" if match[1] == "l" else r"\}"),
        (r"\\([lr])brack(?![A-Za-z])", lambda match: "[" if match[1] == "l" else "]"),
        (r"m?\\angle(?![A-Za-z])", ""),
        (
            r"^(-?)\s*(\\\$|[€£¥₹])\s*(-?\d[^$€£¥₹]*?)[\s.,;:]*$",
            lambda m: rf"{m[1]}{m[3]} \text{{{_CURRENCIES[m[2]]}}}",
        ),
        (r"(\d)\s*€$", r"\1 \\text{euros}"),
        (r"(?<=\d)\"$", r" \\text{inches}"),
        (r"\\?\$", ""),
        (rf"^{_TEXT}\s*\{{([^{{}}]*\d[^{{}}]*)\}}$", r"\1"),
        (rf"^(?:{_TEXT}\s*\{{\s*)?(?:[Oo]ption|[Cc]hoice) (\(?[A-J]\)?)\s*\}}?\.?$", r"\1"),
        (r"^(?:=|\\approx|\\therefore|\\implies|\\Rightarrow)\s*", ""),
        (rf"^(?:{_TEXT}\s*\{{\s*)?[A-Za-z][A-Za-z ,']*(?:\b(?:{_VERBS})\s*:?|nswer:)\s*\}}?\s*(?=[-+\d\\(])", ""),
        (r"\\[()\[\]]", ""),
        (r"\\overline\s*\{([A-Z]{2,})\}", r"\1"),
        (r"(\d*)\.(\d{0,50})(?:\\(?:overline|bar)\s*\{(\d{1,50})\}|\\dot\s*\{?(\d)\}?)", _as_fraction),
        (rf"(?i){_TEXT}\s*\{{\s*({'|'.join(_SCALES)})s?\b", r"\1 \\text{"),
        (rf"(?i)(?<=[\d}}])\s*({'|'.join(_SCALES)})s?\b", lambda m: rf" \cdot 10^{{{_SCALES[m[1].lower()]}}} "),
        (r"\\text\{\s*\}", ""),
        (r"(?<![\w\\.])(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.]*\w)", r"\1 \\cdot 10^{\2}"),
        (r"(?<![\d.,/^_}])(?<!\d )(\d+)(?:\s+|\\[ ,;]\s*)(\d+)\s*/\s*(\d+)(?!\.?\d)", _as_improper),
        (r"(?<=,)\s*(?:\.{3,}|…)|…", r"\\ldots "),  # a list that continues
        (r"(?:\\[,;: ]|~|[\s.,;:])+\\?$|\\$", ""),
        (r"\s+", " "),
    )
)
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
