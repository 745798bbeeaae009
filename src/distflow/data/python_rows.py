"""Rows passed from Python, written to the run's folder as JSON lines, so that a resumed run reads the same ones."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distflow.data.dataset_columns import plain
from distflow.errors import UserError
from distflow.observe.crash_safe_files import write_atomically

MAX_ROWS = 1_000_000

GivenRows = Iterable[object] | Callable[[], Iterable[object]]


def keep_rows(values: GivenRows, file: Path, *, name: str, wanted: int, resuming: bool) -> bool:
    """Write the rows to `file`; returns whether the rows already in it are used instead.

    values: a list of mappings, a `datasets.Dataset`, a `DataFrame`, an iterator, or a function that returns one of
    them. name: for messages. wanted: number of rows needed, -1 for all. resuming: a checkpoint was made with the file's
    rows. Then an iterator is not read, since it may yield other rows each time; other values must hold the same rows.
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
            f"{name}: these are different rows than those that the run began with, which are in {file}. Pass the "
            'same rows to resume, or start again with resume="never" or in another trainer.default_local_dir'
        )
    write_atomically(file, data)
    return False


def json_lines(rows: object, *, source: str, key: str, wanted: int = -1, max_rows: int = MAX_ROWS) -> list[str]:
    """Each row as one JSON text. wanted: stop after this many; -1 takes all, at most `max_rows`.

    Raises UserError if `rows` is not iterable or has more, or a row is not a mapping.
    """
    try:
        rows_read = itertools.islice(iter(rows), wanted if wanted >= 0 else max_rows + 1)  # type: ignore[call-overload]
    except TypeError:
        raise UserError(f"{key}: {source} gives {type(rows).__name__}, which cannot be iterated over") from None
    texts: list[str] = []
    for row in rows_read:
        if not isinstance(row, Mapping):
            raise UserError(
                f"{key}: row {len(texts) + 1} of {source} is {type(row).__name__}, not a mapping from columns to "
                'values: write each row as {"prompt": ..., "answer": ...}'
            )
        texts.append(json.dumps(plain(row)))
    if wanted < 0 and len(texts) > max_rows:
        raise UserError(
            f"{key}: {source} gave more than {max_rows:,} rows; is it infinite? Set data.train_max_samples "
            "(data.val_max_samples) to the number of rows"
        )
    return texts


def _iterable(values: Any, name: str) -> object:
    """An iterable of rows. Raises UserError for whole tables and for splits."""
    if isinstance(values, Mapping):
        splits = [key for key, value in values.items() if hasattr(value, "column_names")]
        what = f"the splits {', '.join(map(str, splits))}" if splits else f"a {type(values).__name__} of columns"
        how = f"give one, e.g. {name}=dataset[{splits[0]!r}]" if splits else "give a list of rows, each a dict"
        raise UserError(f"{name} is {what}: {how}")
    if not (callable(values) or hasattr(values, "__iter__")):
        raise UserError(f"{name} is of type {type(values).__name__}: give a list of rows, each a dict")
    if callable(values) and not hasattr(values, "__iter__"):
        values = values()
    if hasattr(values, "notna") and hasattr(values, "to_dict"):  # pandas, whose empty cells are NaN
        return values.astype(object).where(values.notna(), None).to_dict("records")
    return values


def _called(values: object) -> str:
    return f"the {type(values).__name__} {getattr(values, '__qualname__', '')}".strip()
