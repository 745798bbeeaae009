"""Rows that Python gives: those of a function in `data.train_files`, and those that a script
passes. They are written once to the run's folder, as JSON lines, so that a resumed run reads the
same."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from distflow.data.dataset_columns import FileRow, plain, read_line
from distflow.errors import UserError, blaming
from distflow.import_target import load_function, users_code
from distflow.observe.crash_safe_files import write_atomically

MAX_ROWS = 1_000_000

GivenRows = Iterable[object] | Callable[[], Iterable[object]]


def rows_of_function(target: str, file: Path | None, key: str, wanted: int) -> Iterator[FileRow]:
    """The rows of the function "module:function" or "file.py:function", read from `file`, which is
    written first unless it already has them: JSON lines, of which the first names their origin.

    wanted: as in `json_lines`. Raises UserError if there is no such function, and for values that
    are not rows.
    """
    if file is None:
        raise UserError(
            f"{key}: rows of a function need a run's folder (trainer.default_local_dir) to be kept "
            "in"
        )

    source = f"'{target}'"
    header = json.dumps(source if wanted < 0 else f"{source}, first {wanted}")
    with blaming(key):
        function = cast(Callable[[], object], load_function(target))

    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    if lines[:1] != [header]:
        with users_code(f"{key}: {source} raised", passes=UserError):
            texts = json_lines(function(), source=source, key=key, wanted=wanted, max_rows=MAX_ROWS)
        lines = [header, *texts]
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, "\n".join(lines).encode())

    for number, text in enumerate(lines[1:], 1):
        yield f"{source}, row {number}", read_line(text.encode())


def forget_rows(run_folder: Path) -> None:
    """Remove what `rows_of_function` stored: a new run calls the functions again."""
    for file in (run_folder / "data").glob("*_files-*.rows"):
        file.unlink()


def keep_rows(values: GivenRows, file: Path, *, name: str, wanted: int, resuming: bool) -> bool:
    """Write the rows to `file`; returns whether the rows already in it are used instead.

    values: a list of mappings, a `datasets.Dataset`, a `DataFrame`, an iterator, or a function that
    returns one of them. name: for messages. wanted: number of rows needed, -1 for all. resuming: a
    checkpoint was made with the file's rows. Then an iterator is not read, since it may yield other
    rows each time; other values must hold the same rows. Raises UserError if the values are not
    rows, or differ from the checkpoint's.
    """
    if resuming and file.is_file() and not hasattr(values, "__len__"):
        return True

    rows: Any = _iterable(values, name)
    max_rows = len(rows) if hasattr(rows, "__len__") else MAX_ROWS

    texts = json_lines(rows, source=_called(values), key=name, wanted=wanted, max_rows=max_rows)
    if not texts:
        again = ""
        if hasattr(values, "__next__"):
            again = " (an iterator can be read only once: create a new one)"
        raise UserError(f"{name}: no rows in {_called(values)}{again}")

    data = "".join(f"{text}\n" for text in texts).encode()
    if resuming and file.is_file() and file.read_bytes() != data:
        raise UserError(
            f"{name}: these are different rows than those that the run began with, which are in "
            f"{file}. Pass the "
            'same rows to resume, or start again with resume="never" or in another '
            "trainer.default_local_dir"
        )

    write_atomically(file, data)
    return False


def json_lines(
    rows: object, *, source: str, key: str, wanted: int = -1, max_rows: int = MAX_ROWS
) -> list[str]:
    """Each row as one JSON text. wanted: stop after this many; -1 takes all, at most `max_rows`.

    Raises UserError if `rows` is not iterable or has more, or a row is not a mapping.
    """
    try:
        rows_read = islice(iter(rows), wanted if wanted >= 0 else max_rows + 1)  # type: ignore[call-overload]
    except TypeError:
        raise UserError(
            f"{key}: {source} gives {type(rows).__name__}, which cannot be iterated over"
        ) from None

    texts: list[str] = []
    for row in rows_read:
        if not isinstance(row, Mapping):
            raise UserError(
                f"{key}: row {len(texts) + 1} of {source} is {type(row).__name__}, not a mapping "
                "from columns to "
                'values: write each row as {"prompt": ..., "answer": ...}'
            )

        texts.append(json.dumps(plain(row)))

    if wanted < 0 and len(texts) > max_rows:
        raise UserError(
            f"{key}: {source} gave more than {max_rows:,} rows; is it infinite? Set "
            "data.train_max_samples (data.val_max_samples) to the number of rows"
        )

    return texts


def _iterable(values: Any, name: str) -> object:
    """An iterable of rows. Raises UserError for whole tables and for splits."""
    if isinstance(values, Mapping):
        splits = [key for key, value in values.items() if hasattr(value, "column_names")]
        if splits:
            raise UserError(
                f"{name} is the splits {', '.join(map(str, splits))}: give one, e.g. "
                f"{name}=dataset[{splits[0]!r}]"
            )

        raise UserError(
            f"{name} is a {type(values).__name__} of columns: give a list of rows, each a dict"
        )

    if not (callable(values) or hasattr(values, "__iter__")):
        raise UserError(
            f"{name} is of type {type(values).__name__}: give a list of rows, each a dict"
        )

    if callable(values) and not hasattr(values, "__iter__"):
        values = values()
    if hasattr(values, "notna") and hasattr(values, "to_dict"):  # pandas, whose empty cells are NaN
        return values.astype(object).where(values.notna(), None).to_dict("records")

    return values


def _called(values: object) -> str:
    return f"the {type(values).__name__} {getattr(values, '__qualname__', '')}".strip()
