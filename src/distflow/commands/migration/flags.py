"""Options and overrides of a command line. Nothing is evaluated: a word with a variable or with the
output of another command is marked as unread."""

import re
import shlex
from collections.abc import Iterable, Iterator

from distflow.commands.migration.settings import MAX_KEY_LENGTH, Unread, scalar
from distflow.errors import UserError

_QUOTED = r"""\\.|'[^']*+'|"(?:\\.|[^"\\])*+\""""
_COMMENT = re.compile(rf"({_QUOTED})|(?:(?<=[\s;])|^)#[^\n]*", re.DOTALL | re.MULTILINE)
_REDIRECTION = re.compile(
    rf"({_QUOTED})|(?:(?<!\S)\d+)?(?:&>>?|>[>|]?|<(?!<))&?\s*(?:{_QUOTED}|[^\s;|&<>()]+)", re.DOTALL
)
"""`> log` and `2>&1` are no values of the option before them."""
_COMPUTED = re.compile(r"[$`]")
_OVERRIDE = re.compile(r"(?:--)?\+{0,2}([\w./@-]+)=(.*)", re.DOTALL)
_WHY = "the shell computes it: write its value into the file"


def split_commands(text: str) -> list[list[str]]:
    """The words of each command. Raises UserError if a quotation mark is not closed."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    text = _COMMENT.sub(lambda found: found[1] or "", text)
    text = _REDIRECTION.sub(lambda found: found[1] or " ", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""

    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(";&|\n"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError as error:
        raise UserError("a quotation mark is not closed") from error

    return [words for words in commands if words]


def read_options(words: Iterable[str]) -> Iterator[tuple[str, object]]:
    """The options of a command: `--name value ...`, `--name=value`, `--flag`, and `key=value` of
    Hydra. A word that is none of these has an empty name."""
    name = ""
    values = list[str]()
    for word in [*words, "--"]:
        override = _OVERRIDE.fullmatch(word)
        is_option = word.startswith("--") or re.match(r"-[A-Za-z]", word) is not None
        if name and (override or is_option):
            yield name.replace("-", "_"), read_value(values)
            name = ""

        if len(override[1] if override else name) > MAX_KEY_LENGTH:
            raise UserError(f"a key has more than {MAX_KEY_LENGTH} characters")

        if override:
            key = override[1]
            if word.startswith("--"):
                key = key.replace("-", "_")
            yield key, read_value([override[2]])
        elif word.startswith("--"):
            name = word[2:]
            values = []
        elif name:
            values.append(word)
        else:
            yield "", Unread(_WHY) if _COMPUTED.search(word) else word


def read_value(texts: list[str]) -> object:
    """The value of an option that these words follow: a flag is True, several are a list."""
    if any(map(_COMPUTED.search, texts)):
        return Unread(_WHY)
    if not texts:
        return True
    if len(texts) == 1:
        return scalar(texts[0])
    return [scalar(text.rstrip(",")) for text in texts]
