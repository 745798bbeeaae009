"""Finding the final answer in a text: the last complete box, what follows the last `####`, or an "answer is" phrase."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_UNBRACED_BOX = re.compile(r"[^\s${}\\]+")
_PHRASE = re.compile(r"\banswer\b[^\n.:=]{0,60}?(?:\bis\b|[:=])(?:\*\*|[\s:])*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])")


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; a box that never closes is no answer."""
    for match in reversed(list(_BOX.finditer(text))):
        content = _braced(text, match.end())
        if content is None and not text.startswith("{", match.end()):
            unbraced = _UNBRACED_BOX.match(text, match.end())
            content = unbraced.group() if unbraced else None
        if content is not None:
            return content
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


def _braced(text: str, start: int) -> str | None:
    r"""The inside of the braces that open at `start`; `\{` and `\}` do not count."""
    if not text.startswith("{", start):
        return None
    depth, position = 0, start
    while position < len(text):
        symbol = text[position]
        if symbol == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(symbol, 0)
        if depth == 0:
            return text[start + 1 : position]
        position += 1
    return None
