"""Rows of Python code: passed by the caller, and written to the run's folder as JSON lines, so that a resumed run reads
the same; or printed by a module of ours in a process of its own, where imports of another package stay."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from distflow.data.dataset_columns import Record, plain
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON, write_atomically

MAX_ROWS = 1_000_000

GivenRows = Iterable[object] | Callable[[], Iterable[object]]


def keep_rows(values: GivenRows, file: Path, *, name: str, wanted: int, resuming: bool) -> bool:
    """Write the rows to `file`; returns whether the rows already in it are used instead.

    values: a list of mappings, a `datasets.Dataset`, a `DataFrame`, an iterator, or a function that returns one of
    them. name: for messages. wanted: number of rows needed, -1 for all. resuming: a checkpoint was made with the rows
    of the file. An iterator is then not read, as it may give other rows each time; others must hold the same rows.
    Raises UserError if the values are not rows, or differ from the checkpoint's.
    """
    if resuming and file.is_file() and not hasattr(values, "__len__"):
        return True
    rows: Any = _iterable(values, name)
    max_rows = len(rows) if hasattr(rows, "__len__") else MAX_ROWS
    texts = json_lines(rows, source=_called(values), key=name, wanted=wanted, max_rows=max_rows)
    if not texts:
        again = " (an iterator can be read only once: create a new one)" if hasattr(values, "__next__") else ""
        raise UserError(f"{name}: no rows in {_called(values)}{again}")
    data = "".join(f"{text}\n" for text in texts).encode()
    if resuming and file.is_file() and file.read_bytes() != data:
        raise UserError(
            f"{name}: these are other rows than those that the run began with, which are in {file}. Pass the same to "
            'go on, or start anew with resume="never" or in another trainer.default_local_dir'
        )
    write_atomically(file, data)
    return False


def json_lines(rows: object, *, source: str, key: str, wanted: int = -1, max_rows: int = MAX_ROWS) -> list[str]:
    """Each row as one JSON text. wanted: stop after so many; -1 takes all, at most `max_rows`.

    Raises UserError if it is not iterable or gives more, and for a row that is not a mapping.
    """
    try:
        rows_read = itertools.islice(iter(rows), wanted if wanted >= 0 else max_rows + 1)  # type: ignore[call-overload]
    except TypeError:
        raise UserError(f"{key}: {source} gives {type(rows).__name__}, which cannot be iterated over") from None
    texts: list[str] = []
    for row in rows_read:
        if not isinstance(row, Mapping):
            raise UserError(
                f"{key}: row {len(texts) + 1} of {source} is {type(row).__name__}, not a mapping from columns to values"
            )
        texts.append(json.dumps(plain(row)))
    if wanted < 0 and len(texts) > max_rows:
        raise UserError(
            f"{key}: {source} gave more than {max_rows:,} rows; is it infinite? Set data.train_max_samples "
            "(data.val_max_samples) to the number of rows"
        )
    return texts


def read_printed_rows(module: str, arguments: Sequence[str], source: str, key: str) -> Iterator[Record]:
    """The lines that `python -m module` prints with these arguments: each a row as JSON, or `{"error": reason}`.

    Hashes of texts, on which some packages depend, do not vary in that process. Raises UserError, naming the config's
    `key` and its `source`, for such an error and if the process fails.
    """
    process = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        },
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if process.returncode:
        reason = (process.stderr.strip() or f"its process ended with {process.returncode}").splitlines()[-1]
        raise UserError(f"{key}: '{source}' returned no rows: {reason}")
    for number, line in enumerate(process.stdout.splitlines(), 1):
        found = json.loads(line)
        if "error" in found:
            raise UserError(f"{key}: '{source}': {found['error']}")
        yield Record(f"{source}, row {number}", found)


def print_rows(rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows, or an error, for `read_printed_rows`; other output of their code goes to standard error."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        try:
            for row in rows:
                print(json.dumps(row, default=str), file=out)
        except UserError as error:
            print(json.dumps({"error": str(error)}), file=out)


def read_settings(query: str) -> dict[str, JSON]:
    """The settings in `a=1&b=x`: values that are JSON are parsed, others are texts."""
    settings: dict[str, JSON] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        try:
            settings[name] = json.loads(text)
        except ValueError:
            settings[name] = text
    return settings


def _iterable(values: Any, name: str) -> object:
    """An iterable of rows. Raises UserError for whole tables and for splits."""
    if isinstance(values, Mapping):
        splits = [key for key, value in values.items() if hasattr(value, "column_names")]
        what = f"the splits {', '.join(map(str, splits))}" if splits else f"a {type(values).__name__}"
        how = f"give one, e.g. {name}=dataset[{splits[0]!r}]" if splits else "give a list of rows, each a dict"
        raise UserError(f"{name} is {what}, no rows: {how}")
    if not (callable(values) or hasattr(values, "__iter__")):
        raise UserError(f"{name} is of type {type(values).__name__}, no rows: give a list of rows, each a dict")
    if callable(values) and not hasattr(values, "__iter__"):
        values = values()
    if hasattr(values, "notna") and hasattr(values, "to_dict"):  # pandas, whose empty cells are NaN
        return values.astype(object).where(values.notna(), None).to_dict("records")
    return values


def _called(values: object) -> str:
    return f"the {type(values).__name__} {getattr(values, '__qualname__', '')}".strip()
