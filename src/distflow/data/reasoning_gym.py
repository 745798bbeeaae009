"""Rows of the procedural data sets of the package `reasoning-gym`: `reasoning-gym:NAME?size=100&seed=7&min_terms=2`.

They are generated in a separate process, `python -P -m distflow.data.reasoning_gym NAME SETTINGS`, whose hashes of
texts do not vary: some of the data sets depend on them, and the same seed is to give the same rows."""

import ast
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from distflow.data.dataset_columns import Record
from distflow.data.python_rows import print_rows, read_printed_rows, read_settings
from distflow.errors import UserError, hint

PREFIX = "reasoning-gym:"
COLUMN = "reasoning_gym"
"""Column with what the reward function needs: the data set's name and settings, and the row's entry."""
MISSING = "needs the package reasoning-gym: pip install 'distflow[reasoning-gym]'"
_SIZE, _SEED = 500, 0


def read_records(source: str, key: str, wanted: int = -1) -> Iterator[Record]:
    """The rows of `source`, the first `wanted` of them if that is not negative.

    A row has the columns prompt, answer, data_source (`reasoning-gym/NAME`) and `COLUMN`.
    Raises UserError, naming the config's `key`, if a package, a data set or a setting does not exist.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"{key}: '{source}' {MISSING}")
    name, _, query = source.removeprefix(PREFIX).partition("?")
    settings = read_settings(query)
    size = settings.get("size", _SIZE)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError(f"{key}: '{source}': size is {size!r}, not a number of rows")
    arguments = json.dumps({"seed": _SEED, **settings, "size": size})
    yield from read_printed_rows("distflow.data.reasoning_gym", (name, arguments, str(wanted)), source, key)


def read_entry(text: str) -> dict[str, object]:
    """An entry of the data set. Raises ValueError if it is invalid."""
    try:
        entry = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        entry = json.loads(text)
    if not isinstance(entry, dict):
        raise ValueError(f"the row's entry is not a mapping, but {text:.80}")
    return entry


def write_entry(entry: Mapping[str, object]) -> str:
    """As a Python literal, which keeps tuples and keys that are not str; else as JSON."""
    text = repr(entry)
    try:
        same = ast.literal_eval(text) == entry
    except (ValueError, SyntaxError):
        same = False
    return text if same else json.dumps(entry)


def make_dataset(name: str, settings: Mapping[str, object]) -> Any:
    """Raises UserError for an unknown name or setting, or one that the data set refuses."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no data set '{name}'{hint(name, DATASETS)}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if unknown := [setting for setting in settings if setting not in known]:
        raise UserError(f"'{name}' has no setting '{unknown[0]}'{hint(unknown[0], known)}")
    try:
        return create_dataset(name, **settings)
    except (AssertionError, LookupError, TypeError, ValueError) as error:  # the package checks by assertions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"'{name}' rejects its settings {json.dumps(dict(settings))}: {reason}") from error


def _generate_rows(name: str, settings: Mapping[str, Any], wanted: int) -> Iterator[dict[str, object]]:
    dataset = make_dataset(name, settings)
    for index in range(settings["size"] if wanted < 0 else min(settings["size"], wanted)):
        entry = dataset[index]
        origin = {"name": name, "settings": settings, "entry": write_entry(entry)}
        row = {"prompt": entry["question"], "answer": entry["answer"], "data_source": f"reasoning-gym/{name}"}
        yield {**row, COLUMN: origin}


if __name__ == "__main__":
    print_rows(_generate_rows(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
