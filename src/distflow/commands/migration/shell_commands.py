"""The commands of a shell script, or of any text of command lines.

The text is read once, from its first line to its last, and nothing is evaluated: a variable is what
an earlier line assigns to it literally. Everything else that a shell would compute is marked as
unread.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distflow.commands.migration.settings import MAX_KEY_LENGTH, Unread, scalar
from distflow.errors import UserError, joined

_MAX_VALUE = 10_000
_MAX_EXPANDED = 400_000
"""Characters of a variable's value, and of the whole text with its variables put in."""

_MARK = "\0"
"""Stands around the number of the reason why a part of a word is not read."""

_QUOTED = r"""\\.|\$'(?:\\.|[^'\\])*+'|'[^']*+'|"(?:\\.|[^"\\])*+\""""
_COMMENT = re.compile(rf"({_QUOTED})|(?:(?<=[\s;])|^)#[^\n]*", re.DOTALL | re.MULTILINE)
_PARENTHESES = rf"\((?:{_QUOTED}|\([^()]*+\)|[^()\\'\"])*+\)"
_LINE = re.compile(rf"(?:{_QUOTED}|={_PARENTHESES}|[^\n\\'\"])*+(?:\n|\Z)", re.DOTALL)
_ARRAY = re.compile(
    rf"(?:(?:export|local|readonly|declare(?: -\w+)?) +)?(\w+)(\+?)=({_PARENTHESES})\s*", re.DOTALL
)
_REDIRECTION = re.compile(
    rf"({_QUOTED})|(?:(?<!\S)\d+)?(?:&>>?|>[>|]?|<(?!<))&?\s*(?:{_QUOTED}|[^\s;|&<>()]+)", re.DOTALL
)
"""`> log` and `2>&1` are no values of the option before them."""
_COMPUTED = r"\$(?:\((?:[^()]|\([^()]*+\))*+\))|`[^`]*+`"
_PLACE = re.compile(
    rf"\\.|{_COMPUTED}|\$\{{(?P<array>\w+)\[[@*]\]\}}|\$\{{(?P<braced>\w+)(?::?-(?P<otherwise>[^{{}}$`]*))?\}}"
    r"|\$(?P<name>\w+|[@*#?!$])|\$\{[^{}]*\}",
    re.DOTALL,
)
_IN_QUOTES = re.compile(
    rf"""'[^']*+'|"(?P<quoted>(?:\\.|{_COMPUTED}|[^"\\])*+)"|{_PLACE.pattern}""", re.DOTALL
)
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_PREFIXES = ("export", "local", "readonly", "declare", "do", "then", "else", "{", "exec")
_OPENING = ("if", "for", "while", "until", "case", "elif", "select")
_CLOSING = ("fi", "done", "esac")


@dataclass
class Command:
    """words: without redirections. line: its first."""

    words: list[str]
    line: int


class ShellScript:
    """commands: in order. remarks: what of the text is not followed. reason: why a word is not
    read."""

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self.remarks: list[str] = []
        self._reasons: list[str] = []
        self._values: dict[str, str | Unread] = {}
        self._num_expanded = 0
        self._depth = 0
        branches = list[int]()
        for line, part in _logical_lines(text):
            if array := _ARRAY.fullmatch(part):
                self._read_array(array, line)
                continue
            for words, separator in _split(self._expand(part, line), line):
                if words[:1] == ["eval"]:  # its words are read once more, as the shell does
                    again = self._expand(" ".join(words[1:]), line)
                    self._read_words(next(_split(again, line), ([], ""))[0], "", line)
                    continue
                if words and words[0] in _OPENING:
                    branches.append(line)
                self._read_words(words, separator, line)
        if branches:
            places = joined([str(line) for line in dict.fromkeys(branches)])
            self.remarks.append(
                f"line {places}: branches and loops are not followed: check what they set"
            )

    def read_value(self, texts: list[str]) -> object:
        """The value of an option that these words follow: a flag is True, several are a list."""
        for text in texts:
            if (reason := self.reason(text)) is not None:
                return Unread(reason)
        if not texts:
            return True
        if len(texts) == 1:
            return scalar(texts[0])
        return [scalar(text.rstrip(",")) for text in texts]

    def reason(self, word: str) -> str | None:
        if _MARK in word:
            return self._reasons[int(word.split(_MARK)[1])]
        return "the shell computes it" if "$(" in word or "`" in word or "${" in word else None

    def _read_words(self, words: list[str], separator: str, line: int) -> None:
        while words and words[0] in (*_PREFIXES, *_OPENING, *_CLOSING):
            first = words[0]
            words = words[1:]
            if first in ("for", "select") and words:
                self._values[words[0]] = Unread(f"a loop sets {words[0]}")
                words = []
            if first in _OPENING and first != "elif":
                self._depth += 1
            if first in _CLOSING:
                self._depth = max(self._depth - 1, 0)
        assigned = [found for word in words if (found := _ASSIGNMENT.fullmatch(word))]
        if len(assigned) < len(words):
            self.commands.append(Command(words, line))
            return
        is_sure = self._depth == 0 and separator not in ("&&", "||")
        for found in assigned:
            self._assign(found[1], found[2], found[3], line, is_sure)

    def _assign(self, name: str, plus: str, text: str, line: int, is_sure: bool = True) -> None:
        before = self._values.get(name, "")
        reason = self.reason(text)
        if isinstance(before, Unread) and plus:
            return
        value = f"{before}{text}" if plus else text
        if reason is not None:
            self._values[name] = Unread(reason)
        elif not is_sure and before != value:
            self._values[name] = Unread(f"a branch in line {line} may set {name}")
        elif len(value) > _MAX_VALUE:
            self._values[name] = Unread(f"{name} has more than {_MAX_VALUE:,} characters")
        else:
            self._values[name] = value

    def _read_array(self, array: re.Match[str], line: int) -> None:
        name = f"{array[1]}[]"
        words = [
            word
            for words, _ in _split(self._expand(array[3][1:-1].replace("\n", " "), line), line)
            for word in words
        ]
        before = self._values.get(name, "") if array[2] else ""
        text = " ".join(map(shlex.quote, words))
        value = f"{before} {text}" if isinstance(before, str) else text
        is_long = len(value) > _MAX_VALUE
        self._values[name] = (
            Unread(f"{array[1]} has more than {_MAX_VALUE:,} characters") if is_long else value
        )

    def _expand(self, text: str, line: int) -> str:
        """The text with the values of its variables, quoted as the place needs it."""
        self._count(text, line)

        def put(found: re.Match[str]) -> str:
            if (inside := found["quoted"]) is not None:
                # an array stays several words
                found_inside = re.fullmatch(r"\$\{\w+\[[@*]\]\}", inside)
                return (
                    self._value(_PLACE.fullmatch(inside), line, "")
                    if found_inside
                    else f'"{put_all(inside)}"'
                )
            return found[0] if found[0][0] in "'\\" else self._value(found, line, "")

        def put_all(inside: str) -> str:
            return _PLACE.sub(lambda found: self._value(found, line, '"'), inside)

        return _IN_QUOTES.sub(put, text)

    def _value(self, found: re.Match[str] | None, line: int, quote: str) -> str:
        assert found is not None
        if found[0][0] == "\\":
            return found[0]
        name = found["array"] or found["braced"] or found["name"]
        value: str | Unread
        if name is None:
            value = Unread("the shell computes it")
        elif found["array"]:
            value = self._values.get(f"{name}[]", Unread(f"no line before it assigns {name}"))
        elif name in self._values:
            value = self._values[name]
        elif found["otherwise"] is not None:
            value = found["otherwise"].strip("\"'")
        else:
            is_variable = name.isidentifier()
            value = Unread(
                f"no line before it assigns {name}"
                if is_variable
                else f"the caller gives {found[0]}"
            )
        if isinstance(value, Unread):
            self._reasons.append(value.why)
            return f"{_MARK}{len(self._reasons) - 1}{_MARK}"
        self._count(value, line)
        if quote:
            return re.sub(r'([\\"])', r"\\\1", value)
        if found["array"]:
            return value
        return " ".join(map(shlex.quote, value.split()))

    def _count(self, text: str, line: int) -> None:
        self._num_expanded += len(text)
        if self._num_expanded > _MAX_EXPANDED:
            raise UserError(
                f"line {line}: with its variables put in, the text is longer than "
                f"{_MAX_EXPANDED:,} characters"
            )


def read_options(
    words: list[str], value_of: Callable[[list[str]], object]
) -> Iterator[tuple[str, object]]:
    """The options of a command: `--name value ...`, `--name=value`, `--flag`, and `key=value` of
    Hydra. A word that is none of these has an empty name."""
    name = ""
    values = list[str]()
    for word in [*words, "--"]:
        override = re.fullmatch(r"(?:--)?\+{0,2}([\w./@-]+)=(.*)", word, re.DOTALL)
        is_option = word.startswith("--") or re.match(r"-[A-Za-z]", word) is not None
        if name and (override or is_option):
            yield name.replace("-", "_"), value_of(values)
            name = ""
        if len(override[1] if override else name) > MAX_KEY_LENGTH:
            raise UserError(f"a key has more than {MAX_KEY_LENGTH} characters")
        if override:
            key = override[1].replace("-", "_") if word.startswith("--") else override[1]
            yield key, value_of([override[2]])
        elif word.startswith("--"):
            name = word[2:]
            values = []
        elif name:
            values.append(word)
        else:
            yield "", word


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each with its number; one goes on after a backslash, in a quotation
    and in an array."""
    text = _COMMENT.sub(lambda found: found[1] or "", text.replace("\r\n", "\n"))
    place = 0
    line = 1
    while place < len(text):
        found = _LINE.match(text, place)
        if found is None:
            raise UserError(f"line {line}: a quotation mark is not closed")
        yield line, _plain_quotation(found[0].replace("\\\n", " "))
        line += found[0].count("\n")
        place = found.end()


def _plain_quotation(text: str) -> str:
    """`$'a\\nb'` as an ordinary quotation."""
    escaped = {"n": "\n", "t": "\t"}

    def written(found: re.Match[str]) -> str:
        return shlex.quote(re.sub(r"\\(.)", lambda each: escaped.get(each[1], each[1]), found[1]))

    return re.sub(r"\$'((?:\\.|[^'\\])*+)'", written, text)


def _split(text: str, line: int) -> Iterator[tuple[list[str], str]]:
    """The words of each command of a line, and the operator before it."""
    plain = _REDIRECTION.sub(lambda found: found[1] or " ", text)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words = list[str]()
    separator = ""
    try:
        for word in lexer:
            if word and set(word) <= set(";&|()<>"):
                yield words, separator
                words = []
                separator = word
            else:
                words.append(word)
    except ValueError as error:
        raise UserError(f"line {line}: a quotation mark is not closed") from error
    if words:
        yield words, separator
