"""Finding the final answer in a text: the last complete box, what follows the last `####`, or an "answer is" phrase.

Each search takes time linear in the text: it is the policy who writes it.
"""

import re
from collections.abc import Iterator

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_BOX = re.compile(r"[^\s${}\\]+")
_PHRASE = re.compile(r"\banswer\b[^\n.:=]{0,60}?(?:\bis\b|[:=])(?:\*\*|[\s:])*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])")
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\[((?:[^\\]|\\[^\[\]])+)\\\]|\\\(((?:[^\\]|\\[^()])+)\\\)")
_NUMBER = r"-?\$?(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][+-]?\d+)?"
_UNIT = r"\s?(?:\\?%|°|[A-Za-z]+(?:\^\d|[²³])?(?:/[A-Za-z]+)?)"
_EXPRESSION = re.compile(rf"(?<![^\s=*$(~])\(?{_NUMBER}\)?(?:\s*[-+*/^×÷]\s*\(?{_NUMBER}\)?)*!?({_UNIT})?", re.ASCII)
_JOINED = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*")


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; a box that never closes is no answer."""
    found = list(_BOX.finditer(text))
    if not found:
        return None
    ends = _closing_braces(text)
    for match in reversed(found):
        if text.startswith("{", match.end()):
            if match.end() in ends:
                return text[match.end() + 1 : ends[match.end()]]
        elif unbraced := _UNBRACED_BOX.match(text, match.end()):
            return unbraced.group()
    return None


def after_hashes(text: str) -> str | None:
    """What follows the last `####` on its line, as GSM8K writes its answers."""
    before, mark, after = text.rpartition("####")
    return after.strip().split("\n")[0].strip() if mark else None


def marked_answer(text: str) -> str | None:
    """The answer that the text marks as such, by a box or by `####`; None where it marks none."""
    box = last_box(text)
    return box if box is not None else after_hashes(text)


def phrased_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:", to the end of that sentence or line."""
    found = list(_PHRASE.finditer(text))
    if not found:
        return None
    line, *_ = text[found[-1].end() :].split("\n")
    return _SENTENCE_END.split(line)[0].strip()


def last_mathematics(prose: str) -> tuple[str, str] | None:
    """The last formula between delimiters, or the last number; and the word or sign after the number.

    Neighbouring formulas that a comma, "and" or "or" joins are one answer.
    """
    formulas, numbers = list(_FORMULA.finditer(prose)), list(_EXPRESSION.finditer(prose))
    if formulas and (not numbers or formulas[-1].end() > numbers[-1].end()):
        return ", ".join(reversed(list(_joined(prose, formulas)))), ""
    if not numbers:
        return None
    word = numbers[-1][1] or ""
    return numbers[-1].group().removesuffix(word), word


def _joined(prose: str, formulas: list[re.Match[str]]) -> Iterator[str]:
    """The last formula, then those before it that are joined to it."""
    start = None
    for match in reversed(formulas):
        if start is not None and not _JOINED.fullmatch(prose, match.end(), start):
            return
        yield next(group for group in match.groups() if group is not None)
        start = match.start()


def _closing_braces(text: str) -> dict[int, int]:
    r"""Where each brace that is closed opens: where it closes; `\{` and `\}` do not count."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends
