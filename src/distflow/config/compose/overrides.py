"""Overrides of the command line: Hydra's grammar, and texts that it cannot read are taken as the shell passed them."""

import re
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from distflow.config.compose.origins import COMMAND_LINE
from distflow.config.keys.schema import schema_keys
from distflow.errors import Problem

_CLOSE = "close each bracket, and put the whole in quotes for the shell: 'key=[a, b]', 'key={a: 1, b: [c]}'"
_ITEM_AT_HOME = re.compile(r"(?<=[\[,])\s*(~[^,\[\]{}'\"]*)")


@dataclass
class Overrides:
    """Those that can be read, what is wrong with the others, and the keys that those were to set."""

    parsed: list[Override] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)


def read_overrides(lines: Sequence[str]) -> Overrides:
    """Each line read, or refused with what to write instead."""
    parser, read = OverridesParser.create(), Overrides()
    for line in lines:
        try:
            override = _parse(parser, line)
        except HydraException as error:
            _refuse(read, line, *_unreadable(line, error))
            continue
        if override.is_sweep_override():
            _refuse(read, line, "asks for several runs", _advice_for_commas(line))
        elif override.package is not None or "/" in override.key_or_group:
            advice = "write key=value; a file chooses what it builds on under defaults:"
            _refuse(read, line, "names a file, not a key", advice)
        else:
            read.parsed.append(override)
    return read


def _parse(parser: OverridesParser, line: str) -> Override:
    """Raises HydraException where neither the line nor its value as a text can be read."""
    key, _, value = line.partition("=")
    if "~" in value:
        line = f"{key}={_ITEM_AT_HOME.sub(lambda found: _quoted(found[1]), value)}"
    try:
        return parser.parse_override(line)
    except HydraException:
        if not (value and _takes_text(key.lstrip("+")) and value[0] not in "'\"["):
            raise
        return parser.parse_override(f"{key}={_quoted(value)}")


def _unreadable(line: str, error: HydraException) -> tuple[str, str]:
    """What is wrong with a line that Hydra's grammar has no place for, and what to do."""
    key, equals, value = line.partition("=")
    if key.startswith("-"):
        return "is an option", f"keys are written key=value, without dashes: {line.lstrip('-')}"
    if not equals:
        found = re.fullmatch(r"([\w.]+):\s*(.+)", line)
        written = f"{found[1]}={found[2]}" if found else f"{line}=VALUE" if line in schema_keys() else "key=value"
        return "sets nothing", f"write {written}"
    if key != key.strip() or value[:1] in (" ", "="):
        return "has more than one = between key and value", f"write {key.strip()}={value.strip(' =')}"
    if value[:1] in ("[", "{"):
        return f"is no list or mapping ({_reason(error)})", _CLOSE
    return f"cannot be read ({_reason(error)})", "put a value with spaces, commas or braces in quotes: 'key=\"a, b\"'"


def _advice_for_commas(line: str) -> str:
    key, _, value = line.partition("=")
    if _takes_list(key.lstrip("+")) and re.fullmatch(r"[^\[\]{}()'\"]+", value):
        return f"for a list write '{key}=[{value}]'"
    return "start one run for each value, or put a text with commas in quotes: 'key=\"a,b\"'"


def _takes_text(key: str) -> bool:
    """Whether a text is a value of the key, alone or as a list of one."""
    return any(arm is str or (get_origin(arm) is tuple and get_args(arm)[:1] == (str,)) for arm in _arms(key))


def _takes_list(key: str) -> bool:
    return any(get_origin(arm) is tuple for arm in _arms(key))


def _arms(key: str) -> tuple[object, ...]:
    info = schema_keys().get(key)
    if info is None:
        return ()
    is_union = get_origin(info.annotation) in (Union, types.UnionType)
    return get_args(info.annotation) if is_union else (info.annotation,)


def _quoted(text: str) -> str:
    """As Hydra's grammar has it: a backslash is one by itself, unless a quote follows."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ("\\" if found[2] else "") + found[2], text) + '"'


def _refuse(read: Overrides, line: str, what: str, advice: str) -> None:
    read.problems.append(Problem(((f"'{line}'", COMMAND_LINE),), what, advice))
    read.refused.add(line.partition("=")[0].lstrip("+~"))


def _reason(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first.partition(" expecting ")[0]
