"""Whether what a program printed or returned is what was wanted."""

import re
from collections.abc import Mapping
from typing import Any

TOLERANCE = 1e-6
"""Of a number that is wanted with a decimal point or an exponent, relative to it, or absolute below 1."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_MAX_NUMBER_CHARACTERS = 400


def same_output(printed: str, wanted: str) -> bool:
    """Line by line, white space at their ends and empty lines at the end apart; word by word in a line, numbers by
    value: `2.50` is `2.5`, and within `TOLERANCE` where the number that is wanted is no whole one."""
    found, expected = _lines(printed), _lines(wanted)
    return len(found) == len(expected) and all(map(_same_line, found, expected))


def same_value(returned: Any, wanted: Any) -> bool:
    """As JSON has them: a tuple is a list, a key of a dict is text; otherwise what Python calls equal. What is wanted
    may be the only entry of a list, as APPS has it."""
    value = _as_json(returned)
    return bool(value == wanted) or (isinstance(wanted, list) and len(wanted) == 1 and bool(value == wanted[0]))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not (_is_number(word) and _is_number(wanted)):
        return False
    if _is_whole(word) and _is_whole(wanted):
        return int(word) == int(wanted)
    slack = 0.0 if _is_whole(wanted) else TOLERANCE * max(1.0, abs(float(wanted)))
    return abs(float(word) - float(wanted)) <= slack


def _is_number(word: str) -> bool:
    return len(word) <= _MAX_NUMBER_CHARACTERS and _NUMBER.fullmatch(word) is not None


def _is_whole(word: str) -> bool:
    return word.lstrip("+-").isdigit()


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _as_json(entry) for key, entry in value.items()}
    return value
