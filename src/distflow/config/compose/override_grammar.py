"""The grammar of overrides, which is Hydra's without sweeps: `key=value`, `+key=value`,
`++key=value`, `~key`.

A value is null, true, false, a number, a text, `[a, b]` or `{a: 1, b: [c]}`. A text may be in
quotes; without them a backslash gives the character after it no meaning, and the text must have
neither brackets nor quotes within a list or mapping. `${key}` is left as it is.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

_KEY = re.compile(r"(\+\+|\+|~)?([\w.$/@:][\w.$\-/@:]*)")
_INT = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)")
_FLOAT = re.compile(
    r"[+-]?(\d+(_\d+)*\.|(\d+(_\d+)*)?\.\d+(_\d+)*|\d+(_\d+)*(?=e))(e[+-]?\d+(_\d+)*)?"
    r"|[+-]?(inf|nan)",
    re.I,
)
_WORDS = {"null": None, "true": True, "false": False}
_ESCAPABLE = "\\()[]{}:=, \t"


class Unreadable(ValueError):
    """A line that the grammar does not allow, with the reason."""


@dataclass(frozen=True)
class Override:
    """A line of the command. deletes: `~key`, which has no value."""

    key: str
    value: object
    deletes: bool = False


def parse_override(line: str) -> Override:
    """Raises Unreadable."""
    head, equals, text = line.partition("=")
    found = _KEY.fullmatch(head)
    if found is None:
        raise Unreadable(f"'{head}' is no key")

    deletes = found[1] == "~"
    if deletes:
        return Override(found[2], None, deletes)
    if not equals:
        raise Unreadable("there is no =")

    return Override(found[2], _Reader(text.lstrip()).whole())


def quote(text: str) -> str:
    """The text in quotes, as `parse_override` reads it. Only backslashes before a quote are
    escaped."""

    def escaped(found: re.Match[str]) -> str:
        return found[1] * 2 + ("\\" if found[2] else "") + found[2]

    return '"' + re.sub(r'(\\*)("|$)', escaped, text) + '"'


class _Reader:
    """Reads a value from its text, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> object:
        text = self._text
        if text.startswith("="):
            raise Unreadable("it begins with =")
        if text[:1] not in ("'", '"', "[", "{"):
            return self._plain("")

        value = self._value("")
        self._skip_spaces()
        if self._next():
            raise Unreadable(f"'{text[self._at :]}' follows its end")

        return value

    def _value(self, ends: str) -> object:
        """ends: the characters that end a text without quotes here."""
        self._skip_spaces()
        first = self._next()
        if first == "[":
            return self._list()
        if first == "{":
            return self._mapping()
        if first and first in "'\"":
            return self._quoted(first)

        return self._plain(ends)

    def _list(self) -> list[object]:
        items = list[object]()
        self._at += 1
        while not self._is_closed("]", bool(items)):
            items.append(self._value(",]"))
        return items

    def _mapping(self) -> dict[object, object]:
        entries = dict[object, object]()
        self._at += 1

        while not self._is_closed("}", bool(entries)):
            name = self._value(":,}")
            if name in entries:
                raise Unreadable(f"it names {name} twice")

            self._skip_spaces()
            if self._next() != ":":
                self._fail(":")
            self._at += 1
            entries[name] = self._value(",}")

        return entries

    def _is_closed(self, bracket: str, has_items: bool) -> bool:
        """Whether the list or mapping ends here; else at its next item."""
        self._skip_spaces()
        if self._next() == bracket:
            self._at += 1
            return True

        if has_items:
            if self._next() != ",":
                self._fail(f", or {bracket}")
            self._at += 1

        return False

    def _quoted(self, mark: str) -> str:
        found = re.compile(rf"{mark}((?:\\.|[^\\{mark}])*){mark}", re.S).match(self._text, self._at)
        if found is None:
            raise Unreadable(f"its quote {mark} is not closed")

        self._at = found.end()

        def unescaped(run: re.Match[str]) -> str:
            return run[1][: len(run[1]) // 2] + run[2]

        return re.sub(rf"(\\+)({mark}|$)", unescaped, found[1])

    def _plain(self, ends: str) -> object:
        """A text without quotes: a word with a meaning, a number, or itself."""
        start = self._at
        found = list[str]()
        escapes = False
        while (char := self._next()) and char not in ends:
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in [*_ESCAPABLE]:
                escapes = True
                self._at += 1
                found.append(self._next())
            elif self._text.startswith("${", self._at):
                found.append(self._interpolation())
                continue
            elif ends and char in "[]{}'\"":
                self._fail(f"one of {' '.join(ends)}")
            else:
                found.append(char)

            self._at += 1

        if escapes:
            return "".join(found).strip()

        word = self._text[start : self._at].strip()
        if ends and not word:
            self._fail("a value")
        return _scalar(word)

    def _interpolation(self) -> str:
        """`${...}`, in which others may be nested."""
        start = self._at
        depth = 0
        while char := self._next():
            depth += (char == "{") - (char == "}")
            self._at += 1
            if char == "}" and depth == 0:
                return self._text[start : self._at]

        raise Unreadable("its ${ is not closed")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_spaces(self) -> None:
        while self._next().isspace():
            self._at += 1

    def _fail(self, wanted: str) -> NoReturn:
        there = f"'{self._next()}'" if self._next() else "its end"
        raise Unreadable(f"at {there} there should be {wanted}")


def _scalar(word: str) -> object:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _INT.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        return float(word)
    return word
