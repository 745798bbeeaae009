"""Settings of another system: those of YAML, or of any file of keys and values, and of commands of a shell script.

A script is read and not run: variables, arrays and sums are put in, and what another tool would say, or the caller of
the script, is marked as unread."""

import ast
import operator
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distflow.config.compose.hydra_composition import check_interpolations
from distflow.config.compose.setting_origins import settings_of_value
from distflow.config.compose.unknown_and_unused_keys import is_known
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError

MARK, _SPACE = "\0", "\1"
"""What stands around the reason why a part of a word cannot be read, and between its words."""
_NESTED = r"\([^()]{0,999}+\)"
for _ in range(3):
    _NESTED = rf"\((?:[^()]|{_NESTED}){{0,999}}+\)"
_ARRAY = re.compile(rf"^[ \t]*(\w+\+?=)\(((?:[^()]|{_NESTED})*+)\)", re.MULTILINE)
_PUT = re.compile(rf"\$\{{(\w+)\[[@*]\]\}}|\$(\({_NESTED}\)|{_NESTED})|`([^`]*)`|\$\{{([^{{}}]*)\}}|\$(\w+|[@*#?!])")
_VARIABLE = re.compile(r"(\w+|[@*])(?::?([-=+?])(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_OPENING, _CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_PREFIXES = ("export", "local", "readonly", "declare", "do", "{", "exec", "eval")
_TESTS = (["["], ["[["], ["test"])
_LONGEST, _DEEPEST, _SHOWN = 20_000, 8, 60
_OWN_FOLDER = re.compile(r'"?\$\(\s*dirname\s+(?:--\s+)?"?\$(?:0|\{0\}|\{?BASH_SOURCE(?:\[0\]\})?)"?\s*\)"?')
_PATH = re.compile(
    r"\$\(\s*(?:(?:cd\s+(?:--\s+)?([^\s&;()]+)\s*(?:&?>+\s*/dev/null\s*)?&&\s*)?pwd(?:\s+-P)?"
    r"|(?:realpath|readlink\s+-f)\s+([^\s&;()]+))\s*\)"
)
"""Commands whose outputs are paths from the folder of the script."""
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    **{"=": operator.eq, "==": operator.eq, "!=": operator.ne},
    **{"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le},
    **{"-gt": operator.gt, "-ge": operator.ge},
}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: lambda base, exponent: base ** min(exponent, 64),
}


def calculate(node: ast.expr, value_of: Callable[[ast.expr], object]) -> float:
    """A sum, product or quotient of numbers. value_of: the value of a part. Raises ValueError for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = value_of(node.left), value_of(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            try:
                return _OPERATORS[type(node.op)](left, right)
            except ArithmeticError as error:
                raise ValueError(str(error)) from error
    raise ValueError("it is not a sum of numbers")


class ShellScript:
    """folder: where the script is. commands: the words of each and its line, in order. remarks: on variables that a
    branch would set otherwise."""

    def __init__(self, text: str, folder: str = ".") -> None:
        self.folder = folder
        self.commands: list[tuple[list[str], int]] = []
        self.variables = {"HOME": str(Path.home()), "PWD": ".", "@": "", "*": ""}
        self.remarks: list[str] = []
        self._in_branches: dict[str, str] = {}
        blocks, before = list[_Block](), [""]
        for line, words, separator in _lines(text, self._put):
            if words[:1] == ["for"] and words[2:3] == ["in"]:
                turns = re.sub(r"[^\w.,+/-]", "", ",".join(words[3:]))
                several = _unread(f"it has a different value in each turn of a loop: {_shown(turns)}")
                self._set(words[1], words[3] if len(words) == 4 else several, False)
            words = _enter_blocks(words, blocks)
            runs, before = _runs_after(before, separator), words
            if runs is False or any(block.runs is False for block in blocks):
                continue
            assigned = [_ASSIGNMENT.fullmatch(word) for word in words]
            for each in assigned if all(assigned) else ():
                assert each is not None
                value = self.variables.get(each[1], "") + each[3] if each[2] else each[3]
                self._set(each[1], value, runs is None or any(block.runs is None for block in blocks))
            if words and not all(assigned):
                self.commands.append((words, line))

    def _set(self, name: str, value: str, in_branch: bool) -> None:
        if in_branch and self.variables.get(name, value) != value:
            shown = [re.sub(f"{MARK}[^{MARK}]*{MARK}", "...", text) or "''" for text in (value, self.variables[name])]
            what = f"a branch of the script sets {name}={_shown(shown[0])}; {_shown(shown[1])} is used"
            self._in_branches[name] = what
        elif len(value) < _LONGEST:
            self.variables[name] = value

    def _put(self, text: str) -> str:
        """The text with what `$name`, `${name:-otherwise}`, `$((a * b))` stand for. Arrays are texts of their words."""
        text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)
        for _ in range(_DEEPEST):
            text = _OWN_FOLDER.sub(self.folder, text)
            text = _PATH.sub(self._path, text)
            if len(text) < _LONGEST and _PUT.search(text):
                text = _PUT.sub(self._value, text)
        return text

    def _path(self, found: re.Match[str]) -> str:
        path = self._put((found[1] or found[2] or ".").strip("\"'"))
        return path if MARK in path else posixpath.normpath(path)

    def _value(self, found: re.Match[str]) -> str:
        array, inside, quoted, braced, name = found.groups()
        if inside is not None and inside.startswith("(("):
            return self._sum(inside[2:-2])
        if inside is not None or quoted is not None:
            return _unread("it is the output of a command")
        variable = _VARIABLE.fullmatch(array or braced or name)
        if variable is None:
            return _unread("a variable is changed in it")
        name, sign, otherwise = variable.groups()
        if name in self.variables and sign != "+":
            self.remarks += [self._in_branches.pop(name)] if name in self._in_branches else []
            return self.variables[name]
        if array or sign == "+" or sign in ("-", "="):
            return "" if array or sign == "+" else otherwise.strip("\"'")
        return _unread(f"the variable {name} is not set in the file")

    def _sum(self, text: str) -> str:
        def value_of(node: ast.expr) -> object:
            if isinstance(node, ast.Name):
                return scalar(self.variables.get(node.id, ""))
            return node.value if isinstance(node, ast.Constant) else calculate(node, value_of)

        try:
            names = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
            return str(calculate(ast.parse(f"({names})+0".replace("/", "//"), mode="eval").body, value_of))
        except (ValueError, SyntaxError, RecursionError):
            return _unread("it is a sum")


@dataclass
class _Block:
    """An `if`, a loop or a `case` that is open. runs: whether its present branch does; None if the file does not say.
    done: whether an earlier branch of an `if` did. is_tested: what is read is its condition."""

    runs: bool | None = None
    done: bool | None = False
    is_tested: bool = False


def _enter_blocks(words: list[str], blocks: list[_Block]) -> list[str]:
    """Open, change and close the blocks that a command begins with or ends; returns the words after them. A condition
    of several commands is not decided."""
    if blocks and blocks[-1].is_tested:
        blocks[-1].is_tested = words[:1] != ["then"]
        if blocks[-1].is_tested and words:
            blocks[-1].runs, words = None, []
    while words and words[0] in (*_PREFIXES, *_OPENING, *_CLOSING, "then", "elif", "else"):
        first, words = words[0], words[1:]
        if first in _OPENING:
            blocks.append(_Block(_holds(words) if first == "if" else None, is_tested=first == "if"))
            words = [] if first == "if" else words
        elif first in ("elif", "else") and blocks:
            block = blocks[-1]
            block.done = block.done or block.runs if block.done is not None or block.runs else None
            holds = _holds(words) if first == "elif" else True
            block.runs = False if block.done or holds is False else None if block.done is None else holds
            words, block.is_tested = [] if first == "elif" else words, first == "elif"
        elif first in _CLOSING and blocks:
            blocks.pop()
    return words


def _runs_after(before: list[str], separator: str) -> bool | None:
    """Whether a command runs, by the one before it; of others than tests it is taken that they succeed before `&&`."""
    holds = _holds(before)
    if separator == "&&":
        return holds if before[:1] in _TESTS else True
    return (None if holds is None else not holds) if separator == "||" else True


def _holds(words: list[str]) -> bool | None:
    """What a test of two values, `[ A = B ]`, or of one, `[ -z A ]`, gives; None if the file does not decide it."""
    inside = words[1:-1] if words[:1] + words[-1:] in (["[", "]"], ["[[", "]]"]) else words[1:]
    if inside[:1] == ["!"]:
        holds = _holds(["test", *inside[1:]])
        return None if holds is None else not holds
    if words[:1] not in _TESTS or any(MARK in word for word in inside):
        return None
    if len(inside) == 2 and inside[0] in ("-z", "-n"):
        return (inside[1] == "") == (inside[0] == "-z")
    if len(inside) != 3 or inside[1] not in _COMPARISONS or "*" in inside[2]:
        return None
    pair = [scalar(word) if inside[1].startswith("-") else word for word in (inside[0], inside[2])]
    is_sure = not inside[1].startswith("-") or all(isinstance(each, int) for each in pair)
    return _COMPARISONS[inside[1]](*pair) if is_sure else None


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def _unread(why: str) -> str:
    """As one word, wherever it is put."""
    return MARK + why.replace(" ", _SPACE) + MARK


def _lines(text: str, put: Callable[[str], str]) -> Iterator[tuple[int, list[str], str]]:
    """The words of each command, its line, and the operator before it: `;`, `&&`. An array is one assignment; a text
    over several lines goes on."""
    text = _without_comments(text.replace("\r\n", "\n"))
    text = _ARRAY.sub(
        lambda array: f"{array[1]}{shlex.quote(' '.join(array[2].split()))}" + "\n" * array[2].count("\n"), text
    )
    line, held = 1, ""
    for number, part in enumerate(text.split("\n"), 1):
        line, held = line if held else number, held + part
        if held.endswith("\n" + part) and not {"'", '"'} & set(part) and len(held) < _LONGEST:
            held += "\n"  # within a quotation
            continue
        if held.endswith("\\"):
            held = held[:-1] + " "
            continue
        if len(held) > _LONGEST:
            raise UserError(f"line {line}: a quotation mark is not closed")
        plain = _REDIRECTION.sub(lambda found: found[1] or " ", put(held))
        lexer = shlex.shlex(plain, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = list(lexer)
        except ValueError:
            held += "\n"
            continue
        held, command, between = "", list[str](), ";"
        for word in [*words, ";"]:
            if word and set(word) <= set(";&|()<>"):
                yield line, command, between
                command, between = [], word
            else:
                command.append(word)
    if held.strip():
        raise UserError(f"line {line}: a quotation mark is not closed")


_COMMENT = re.compile(
    r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*")|\$'((?:\\.|[^'\\])*)'|(?:(?<=\s)|^)\#[^\n]*""", re.MULTILINE | re.DOTALL
)
_ESCAPED = {"n": "\n", "t": "\t"}


def _without_comments(text: str) -> str:
    """A comment may have any quotation marks, and a quotation a number sign. `$'a\\nb'` becomes a plain quotation."""

    def written(found: re.Match[str]) -> str:
        if found[2] is None:
            return found[1] or ""
        return shlex.quote(re.sub(r"\\(.)", lambda escaped: _ESCAPED.get(escaped[1], escaped[1]), found[2]))

    return _COMMENT.sub(written, text)


_QUOTED = r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*")"""
_TARGET = rf"(?:{_QUOTED}|[^\s;|&<>()]+)"
_REDIRECTION = re.compile(rf"{_QUOTED}|(?:(?<!\S)\d+)?(?:&>>?|>[>|]?|<(?!<))&?\s*{_TARGET}", re.DOTALL)
"""`> log` and `2>&1` are no values of the option before them."""


def read_options(words: list[str], into: Callable[[str, object], None]) -> None:
    """The options of a command: `--name value ...`, `--name=value`, `--flag`, and `key=value` of Hydra."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        override = re.fullmatch(r"(?:--)?\+{0,2}([\w.-]+)=(.*)", word, re.DOTALL)
        if name and (override or word.startswith("--")):
            into(name.replace("-", "_"), _as_value(values))
            name = ""
        if override:
            into(override[1].replace("-", "_") if word.startswith("--") else override[1], _as_value([override[2]]))
        elif word.startswith("--"):
            name, values = word[2:], []
        elif name:
            values.append(word)


def _as_value(texts: list[str]) -> object:
    unread = [part for text in texts for part in text.split(MARK)[1::2]]
    values = [scalar(text.rstrip(",") if len(texts) > 1 else text) for text in texts]
    if unread:
        return Unread(unread[0].replace(_SPACE, " "))
    return (values[0] if len(values) == 1 else values) if values else True


_LEAST_KNOWN = 0.5  # of a file's keys; with fewer it is another tool's, or of a version that the tables do not have
_NUMBERS_OF_RANGE = re.compile(r"list\(range\((\d+), ?(\d+)\)\)")
_ESTIMATORS = ("algorithm.adv_estimator", "adv_estimator", "advantage_estimator")


@dataclass(frozen=True)
class Unread:
    """In place of a value that the file does not say: why."""

    why: str


@dataclass
class ForeignSettings:
    """method: grpo (any without a critic), ppo, sft or rm. lines: of keys, where known. remarks: what else is to be
    said of the file. devices: that it trains on, if it says so."""

    system: str
    method: str
    values: dict[str, object] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    devices: int | None = None

    def add(self, key: str, value: object, line: int) -> None:
        self.values[key], self.lines[key] = value, line


def scalar(text: str) -> object:
    """A value as the command lines of all systems have it: null, a Boolean, a number, a list of these, or a text."""
    word = text.strip()
    if word.lower() in ("none", "null", "true", "false"):
        return {"true": True, "false": False}.get(word.lower())
    if word.startswith("[") and word.endswith("]"):
        return [scalar(part.strip(" '\"")) for part in word[1:-1].split(",") if part.strip()]
    pairs = [part.partition(":") for part in word[1:-1].split(",")] if word[:1] + word[-1:] == "{}" else []
    if pairs and all(sign and "{" not in value for _, sign, value in pairs):
        return {name.strip(" '\""): scalar(value.strip(" '\"")) for name, _, value in pairs}
    if numbers := _NUMBERS_OF_RANGE.fullmatch(word):  # as ROLL names devices
        return [*range(int(numbers[1]), min(int(numbers[2]), 10_000))]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return text


def identify(values: dict[str, object]) -> ForeignSettings:
    """The settings of a file that has only keys and values, told by the keys. Raises UserError for no system's."""
    unread = {name: value for name, value in values.items() if isinstance(value, Unread)}
    values = {name: value for name, value in values.items() if name not in unread}
    try:
        check_interpolations(values)
    except ValueError as error:
        raise UserError(str(error)) from error
    tree = OmegaConf.create(values)
    keys = [each.key for name in values for each in settings_of_value(str(name), values[name], "") if not each.is_group]
    read = dict[str, object]()
    for key in (key for key in keys if not key.startswith(("defaults", "hydra"))):
        read |= _leaves(key, _value(tree, key))
    read |= unread
    if not any(key.startswith("actor.") for key in read) and "model.optimizer.lr" in read:  # AReaL's fine-tuning
        read = {re.sub(r"^model\.", "actor.", key): value for key, value in read.items()}
    tables = all_tables()
    known = {name: sum(tables[name].find(key) is not None for key in read) for name in tables}
    known["verl"] += sum(tables["verl"].find(key) is None and is_known(key) for key in read)
    system = max(known, key=lambda name: known[name])
    if known[system] < _LEAST_KNOWN * len(read) or not read:
        most = f"{known[system]} of its {len(read)} keys are keys of {system}, and fewer are keys of another system"
        raise UserError(
            f"{most if known[system] else 'none of its keys is a key of another system'}: it is not a config of TRL, "
            "OpenRLHF, verl, ROLL or AReaL, or one of an unknown version"
        )
    return ForeignSettings(system, method_of(system, read), read)


def _leaves(key: str, value: object) -> dict[str, object]:
    """A section that is the interpolation of another has its settings."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {own: leaf for name, part in value.items() for own, leaf in _leaves(f"{key}.{name}", part).items()}


def _value(tree: object, key: str) -> object:
    try:
        found = OmegaConf.select(tree, key)  # type: ignore[arg-type]  # what `create` made of a mapping is one
    except OmegaConfBaseException as error:
        return Unread(str(error).splitlines()[0])
    value = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    return scalar(value) if isinstance(value, str) else value


def method_of(system: str, values: Mapping[str, object]) -> str:
    """What the settings train, where nothing but they tells it."""
    if system == "TRL":
        is_rl = any(key in values for key in ("num_generations", "max_completion_length", "reward_funcs", "beta"))
        return "grpo" if is_rl else "ppo" if "num_ppo_epochs" in values else "sft"
    if system == "AReaL" and (values.get("actor.is_critic") is True or values.get("train_dataset.type") == "rw"):
        return "rm"
    of_rl = {"verl": ("actor_rollout_ref.",), "ROLL": ("actor_infer.", "rewards.", "rollout_")}
    of_rl["AReaL"] = ("gconfig.", "critic.")
    if not any(key.startswith(of_rl.get(system, ("",))) for key in values):
        return "sft"
    by_default = "" if system == "AReaL" and "critic.path" not in values else "gae"
    estimator = next((values[key] for key in _ESTIMATORS if key in values), by_default)
    return "ppo" if estimator == "gae" else "grpo"
