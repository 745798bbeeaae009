"""Commands of a shell script, read and not run: variables, arrays and sums are put in, and what another program would
say, or the caller of the script, is marked as unread."""

import ast
import operator
import re
from collections.abc import Callable
from pathlib import Path

from distflow.config.migration.foreign_settings import Unread, scalar
from distflow.errors import UserError

Word = tuple[str, int]
"""A word of a command, and its line. What is unread in it stands between `MARK`s."""
MARK = "\0"
_NESTED = r"\([^()]{0,999}+\)"
for _ in range(3):
    _NESTED = rf"\((?:[^()]|{_NESTED}){{0,999}}+\)"
_PUT = rf"\$\{{(?:[^{{}}]|\{{[^{{}}]*\}}){{0,999}}+\}}|`[^`]*`|\${_NESTED}|\$\w+|\$[@*\#?!-]"
_PART = re.compile(
    rf"""(?P<space>(?:\\\n|[ \t\r])+) | (?P<comment>(?<![^\s;(])\#[^\n]*) | '(?P<literal>[^']*)'
    | \$'(?P<ansi>(?:\\.|[^'\\])*)' | "(?P<quoted>(?:\\.|\${_NESTED}|[^"\\])*+)" | (?P<put>{_PUT}) | \\(?P<char>.)
    | (?P<end>[\n;&|()<>]) | (?P<plain>[^\s\\'"`$;&|()<>]+|\$)""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\(?P<char>[\"\\$`])|\\\n|(?P<put>{_PUT})")
_VARIABLE = re.compile(r"(\w+)(?:(\[@\]|\[\*\])|:?([-=+?])(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_OPENING, _CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_PREFIXES = ("export", "local", "readonly", "declare", "then", "do", "else", "{", "exec", "eval")
_LONGEST = 100_000
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(node: ast.expr, value_of: Callable[[ast.expr], object]) -> object:
    """A sum, product or quotient of numbers. value_of: the value of a part. Raises ValueError for anything else."""
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError("it is computed")
    left, right = value_of(node.left), value_of(node.right)
    if not all(isinstance(each, int | float) for each in (left, right)) or right == 0 and isinstance(node.op, ast.Mod):
        raise ValueError("it is computed")
    try:
        return _OPERATORS[type(node.op)](left, right)  # type: ignore[arg-type]  # numbers, as was asked
    except ArithmeticError as error:
        raise ValueError(str(error)) from error


class ShellScript:
    """commands: the words of each, in order. variables: of the script so far, lists for arrays. remarks: on variables that
    a branch would set otherwise."""

    def __init__(self, text: str) -> None:
        self.commands: list[list[Word]] = []
        self.variables: dict[str, str | list[str]] = {"HOME": str(Path.home())}
        self.remarks: list[str] = []
        self._in_branches: dict[str, str] = {}
        self._words: list[Word] = []
        self._depth = 0
        self._array: str | None = None
        self._read(text)

    def _read(self, text: str) -> None:
        place, word = 0, None
        while place < len(text):
            part = _PART.match(text, place)
            line = text.count("\n", 0, place) + 1
            if part is None:
                raise UserError(f"line {line}: a quotation mark or bracket is opened there and not closed")
            place, kind = part.end(), part.lastgroup
            if kind == "put" and word is None and re.match(r"[\s;&|]|$", text[place : place + 1] or " "):
                self._words += [(each, line) for each in self._put(part[0]).split()]
            elif kind == "quoted" and (array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", part["quoted"])):
                self._words += [(each, line) for each in self._array_of(array[1])]
            elif kind in ("space", "comment", "end"):
                self._words += [(word, line)] if word is not None else []
                word = None
                if kind == "end":
                    self._end(part[0])
            else:
                word = (word or "") + self._text(part)
        self._words += [(word, text.count("\n") + 1)] if word is not None else []
        self._end("\n")

    def _text(self, part: re.Match[str]) -> str:
        if part.lastgroup == "put":
            return self._put(part[0])
        if part.lastgroup == "ansi":
            return part["ansi"].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'")
        if part.lastgroup == "quoted":
            return _IN_QUOTES.sub(lambda each: self._put(each[0]) if each["put"] else each["char"] or "", part["quoted"])
        return part[part.lastgroup or 0]

    def _put(self, text: str) -> str:
        """What stands for `$name`, `${name:-otherwise}`, `$((a * b))`."""
        if text.startswith("$((") and text.endswith("))"):
            return self._sum(text[3:-2])
        if text[0] == "`" or text.startswith("$("):
            return f"{MARK}the output of {text}{MARK}"
        found = _VARIABLE.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if text in ("$@", "$*") or found is None:
            return "" if found is None and text in ("$@", "$*", "${@}", "${*}") else f"{MARK}{text}{MARK}"
        name, _, sign, otherwise = found.groups()
        if name in self.variables and sign != "+":
            self.remarks += [self._in_branches.pop(name)] if name in self._in_branches else []
            return " ".join(self._array_of(name))
        if sign in ("-", "="):
            inner = _IN_QUOTES.sub(lambda each: self._put(each[0]) if each["put"] else each["char"] or "", otherwise)
            value = inner.strip("\"'")
            if sign == "=":
                self.variables[name] = value
            return value
        return "" if sign == "+" else f"{MARK}${name} is not set in the file{MARK}"

    def _array_of(self, name: str) -> list[str]:
        value = self.variables.get(name, [])
        return [value] if isinstance(value, str) else value

    def _sum(self, text: str) -> str:
        """Of integers and names of variables."""
        text = re.sub(r"\$\{?(\w+)\}?", r"\1", text)

        def value_of(node: ast.expr) -> object:
            if isinstance(node, ast.Name):
                return scalar("".join(self._array_of(node.id)))
            return node.value if isinstance(node, ast.Constant) else calculate(node, value_of)

        try:
            value = calculate(ast.parse(f"({text})+0".replace("/", "//"), mode="eval").body, value_of)
        except (ValueError, SyntaxError, RecursionError):
            return f"{MARK}the sum $(({text})){MARK}"
        return str(value)

    def _end(self, sign: str) -> None:
        """The end of a command, or of an array's words. In branches only names that are new get a value."""
        last = self._words[-1][0] if self._words else ""
        if sign == "(" and self._array is None and re.fullmatch(r"\w+\+?=", last):
            self._array = last
            self._words.pop()
        elif self._array is not None:
            if sign == ")":
                name, words = self._array.rstrip("+="), [word for word, _ in self._words]
                self._set(name, self._array_of(name) + words if self._array.endswith("+=") else words)
                self._array, self._words = None, []
        else:
            self._run()

    def _run(self) -> None:
        words, self._words = self._words, []
        while words and (words[0][0] in (*_PREFIXES, *_OPENING, *_CLOSING) or words[0][0].startswith("-")):
            self._depth += (words[0][0] in _OPENING) - (words[0][0] in _CLOSING)
            words = words[1:]
        assigned = [_ASSIGNMENT.fullmatch(word) for word, _ in words]
        if words and all(assigned):
            for each in filter(None, assigned):
                name, added, value = each.groups()
                self._set(name, "".join(self._array_of(name)) + value if added else value)
        elif words:
            self.commands.append(words)

    def _set(self, name: str, value: str | list[str]) -> None:
        if len(str(value)) > _LONGEST:
            raise UserError(f"the variable {name} gets longer than {_LONGEST:,} characters")
        if self._depth <= 0 or name not in self.variables:
            self.variables[name] = value
        elif value != self.variables[name]:
            self._in_branches[name] = f"a branch of the script sets {name}={value}; {self.variables[name]} is taken"


def read_options(words: list[Word], into: Callable[[str, object, int], None]) -> None:
    """The options of a command: `--name value ...`, `--name=value`, `--flag`, and `key=value` of Hydra."""
    name, line, values = "", 0, list[str]()
    for word, at in [*words, ("--", 0)]:
        if not word.startswith("--") and name and "=" not in name:
            values.append(word)
        elif not word.startswith("--") and (found := re.fullmatch(r"\+{0,2}([\w.]+)=(.*)", word, re.DOTALL)):
            into(found[1], _value([found[2]]), at)
        elif word.startswith("--"):
            if name:
                key, _, value = name.partition("=")
                into(key.replace("-", "_"), _value([value] if "=" in name else values), line)
            name, line, values = word[2:], at, []


def _value(texts: list[str]) -> object:
    unread = [part for text in texts for part in text.split(MARK)[1::2]]
    if unread:
        return Unread(unread[0])
    values = [scalar(text.rstrip(",") if len(texts) > 1 else text) for text in texts]
    return True if not values else values[0] if len(values) == 1 else values
