"""Finding the program in an answer. Takes time linear in the text: it is the policy who writes it."""

import re
import textwrap
from collections.abc import Sequence

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`{]*)[^`\n]*")
_PYTHON = ("python", "python3", "py", "py3")
_THOUGHT_END = "</think>"


def find_program(answer: str, names: Sequence[str] = ()) -> str | None:
    """The program, or None where the answer shows code of other languages only.

    What is thought before the last `</think>` does not count. Of the fenced blocks those marked as Python count, or,
    where none is, those without a mark; the last of them that defines one of `names` is the program, else the last. A
    block that is never closed ends with the answer. An answer without a fence is a program as a whole.
    """
    text = answer.rpartition(_THOUGHT_END)[2]
    blocks = _fenced(text)
    if not blocks:
        return text
    candidates = [body for mark, body in blocks if mark in _PYTHON] or [body for mark, body in blocks if not mark]
    if not candidates:
        return None
    defining = [body for body in candidates if any(defines(body, name) for name in names)]
    return (defining or candidates)[-1]


def _fenced(text: str) -> list[tuple[str, str]]:
    """(language, code) of each block."""
    blocks: list[tuple[str, str]] = []
    fence, mark, body = "", "", list[str]()
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line.rstrip())
        if fence and match and match[1].startswith(fence) and not match[2]:
            blocks.append((mark, textwrap.dedent("\n".join(body))))
            fence = ""
        elif not fence and match:
            fence, mark, body = match[1], match[2].lower(), []
        elif fence:
            body.append(line)
    if fence:
        blocks.append((mark, textwrap.dedent("\n".join(body))))
    return blocks


def defines(program: str, name: str) -> bool:
    """Whether a line of it defines a function, a class, or at the top level a variable of that name."""
    name = re.escape(name)
    return re.search(rf"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*=", program, re.M) is not None
