"""Config keys given as Python values, as the lines `key=value` that the command line takes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from distflow.config.errors import UserError
from distflow.config.keys import dotted
from distflow.config.schema import schema_keys

Overrides: TypeAlias = Mapping[str, object] | Sequence[str]
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")


def to_lines(overrides: Overrides) -> list[str]:
    """Of a mapping, nested or with dotted keys, one line for each key; lines stay as they are.

    Raises UserError for what is neither, and for a value that no config can hold.
    """
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={_text(value, key)}" for key, value in _leaves("", overrides)]
    lines = list(overrides) if isinstance(overrides, Sequence) else None
    if lines is None or not all(isinstance(line, str) for line in lines):
        raise UserError(f"overrides are {overrides!r:.80}: give a dict, or a list of texts 'key=value'")
    return lines


def key_of(line: str) -> str:
    """The key that a line sets."""
    return line.partition("=")[0].lstrip("+~")


def _leaves(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    keys = schema_keys()
    for name, value in values.items():
        key = dotted(prefix, str(name))
        if isinstance(value, Mapping) and value and key not in keys:
            yield from _leaves(key, cast(Mapping[str, object], value))
        else:
            yield key, value


def _text(value: Any, key: str) -> str:
    """The value in Hydra's grammar. Raises UserError."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str | Path):
        return QuotedString(str(value), Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_escaped(name)}:{_text(item, key)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item, key) for item in value) + "]"
    if callable(item := getattr(value, "item", None)):  # a number of numpy or torch
        return _text(item(), key)
    raise UserError(f"{key} is {value!r:.80}, a {type(value).__name__}: a config holds numbers, texts, lists and dicts")


def _escaped(name: object) -> str:
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", str(name))
