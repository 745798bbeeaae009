"""Reads rows from the sources in `data.train_files`: files, data sets of `datasets`, built-in ones,
functions. Writes those that are passed from Python to the run's folder, as JSON lines.

Each row of a JSONL, JSON, CSV or Parquet file has its file and line; a problem of a whole file
is a UserError. A function's rows are written once to a file in the run's folder, so that a
resumed run reads the same.
"""

import csv
import hashlib
import json
import re
from codecs import BOM_UTF8, iterdecode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from errno import EFBIG
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow

from distflow.builtin_names import HUB_DATA
from distflow.data.dataset_columns import (
    BadRows,
    Columns,
    FileRow,
    RawRow,
    Values,
    plain,
    read_rows,
)
from distflow.errors import UserError, blaming, missing_path
from distflow.hub_id_or_local_path import unreachable
from distflow.import_target import load_function, users_code
from distflow.observe.crash_safe_files import write_atomically
from distflow.untrusted_files import (
    COMPRESSIONS,
    MAX_JSON_VALUES,
    MAX_LINE_BYTES,
    count_values,
    is_compressed,
    lines_of,
    matching_files,
)

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
MAX_LIST_BYTES = 128 * 2**20
_ROW_BYTES = 500
_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|.*\.py):[A-Za-z_]\w*")
MAX_ROWS = 1_000_000

Source = str | Path
GivenRows = Iterable[object] | Callable[[], Iterable[object]]
Rows = Iterable[Values]


def load_rows(
    sources: Source | Sequence[Source],
    columns: Columns,
    *,
    key: str = "data.train_files",
    bad_rows: str = "error",
    max_samples: int = -1,
    run_folder: Path | None = None,
) -> tuple[list[RawRow], BadRows]:
    """All good rows, in the order of the sources, and the bad ones.

    sources: one or a list of
      - a `.jsonl`, `.json`, `.csv` or `.parquet` file, `.jsonl.gz`, `.jsonl.zst`, or a pattern such
        as `a/*.jsonl`;
      - a folder that `datasets` can read, or an id on the hub, with its configuration and split if
        there are several: `openai/gsm8k:main:train`, `folder::train`;
      - `builtin:NAME`, which ships with the package;
      - "module:function" or "file.py:function" that returns mappings.
    key: the config key that named them, for messages. bad_rows: "error" or "skip". max_samples:
    total number of rows, -1 for all. run_folder: stores the rows of functions, which require it.
    Raises UserError for unreadable sources, for bad rows unless skipped, and if there are no rows,
    unless they are chosen by tags.
    """
    bad = BadRows(bad_rows)
    rows: list[RawRow] = []
    listed = [sources] if isinstance(sources, str | Path) else sources
    # `train_files`, or `NAME.train_files` of a domain
    name = key.removeprefix("data.").removeprefix("domains.")
    for number, source in enumerate(listed):
        wanted = -1 if max_samples < 0 else max_samples - len(rows)
        if wanted == 0:
            break
        file = run_folder / "data" / f"{name}-{number}.rows" if run_folder is not None else None
        text = str(source)
        most = -1 if columns.domain_of_tag else wanted
        if is_function(text):
            file_rows = _made_rows(text, key, file, most)
        else:
            file_rows = rows_of(text, key)
        found = read_rows(file_rows, columns, bad, f"'{source}'")
        rows.extend(found if wanted < 0 else islice(found, wanted))
    bad.check()
    if not rows and not columns.domain_of_tag:
        skipped = ""
        if bad.reasons:
            skipped = f" ({len(bad.reasons)} bad ones were skipped, the first: {bad.reasons[0]})"
        named = ", ".join(f"'{source}'" for source in listed)
        raise UserError(f"{key}: no rows in {named or 'an empty list'}{skipped}")
    return rows, bad


def forget_rows(run_folder: Path) -> None:
    """Remove the rows of functions that `load_rows` stored: a new run calls the functions again."""
    for file in (run_folder / "data").glob("*_files-*.rows"):
        file.unlink()


def is_function(source: str) -> bool:
    """Whether the source names a function that `load_rows` imports and calls, not a data set with a
    similar name."""
    if source.startswith("builtin:") or not _FUNCTION.fullmatch(source):
        return False
    return not (
        Path(source).expanduser().is_file() or Path(source.partition(":")[0]).expanduser().is_dir()
    )


def _rows_of_function(target: str, file: Path, key: str, wanted: int) -> Iterator[FileRow]:
    """The rows of the function "module:function" or "file.py:function", read from `file`, which is
    written first unless it already has them: lines of JSON, of which the first has their origin and
    fingerprint.

    wanted: as in `json_lines`. Raises UserError if there is no such function, and for values that
    are not rows.
    """
    source = f"'{target}'"
    identity = source if wanted < 0 else f"{source}, first {wanted}"
    with blaming(key):
        function = cast(Callable[[], object], load_function(target))
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    begins = f"{json.dumps(identity)} "
    if not lines or not lines[0].startswith(begins):
        with users_code(f"{key}: {source} raised", passes=UserError):
            texts = json_lines(function(), source=source, key=key, wanted=wanted, max_rows=MAX_ROWS)
        lines = [begins + _fingerprint(texts), *texts]
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, "\n".join(lines).encode())
    header, *texts = lines
    if header != begins + _fingerprint(texts):
        raise UserError(f"{key}: '{file}' is damaged: delete it to read {source} again")
    for number, text in enumerate(texts, 1):
        yield f"{source}, row {number}", json.loads(text)


def read_file(path: Path, key: str) -> Iterator[FileRow]:
    """The rows of a file, by its suffix. key: the config key that named it, for messages.

    Raises UserError if the file has an unknown kind, cannot be opened, or has content that does not
    match its suffix."""
    reader = _read_jsonl if is_compressed(path) else READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{key}: '{path}' ends in '{path.suffix}'; known are {', '.join(READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise UserError(f"{key}: '{path}' cannot be read: {error.strerror or error}") from error


def _made_rows(text: str, key: str, file: Path | None, wanted: int) -> Iterator[FileRow]:
    """The rows of a function."""
    if file is None:
        raise UserError(
            f"{key}: rows of a function need a run's folder (trainer.default_local_dir) to be kept "
            "in"
        )
    return _rows_of_function(text, file, key, wanted)


def is_data_set(text: str) -> bool:
    """Whether the source is a folder or an id on the hub, which `datasets` reads."""
    path = Path(text).expanduser()
    if path.is_file() or is_function(text):
        return False
    is_hub_id = HUB_DATA.fullmatch(text) and path.suffix.lower() not in READERS
    return bool(is_hub_id) or Path(text.partition(":")[0]).expanduser().is_dir()


def rows_of(text: str, key: str) -> Iterator[FileRow]:
    """The rows of a file, of a pattern's files, of a built-in data set or one of `datasets`."""
    if text.startswith("builtin:"):
        name = text.removeprefix("builtin:")
        file = BUILTIN_FOLDER / f"{name}.jsonl"
        if file.is_file():
            return read_file(file, key)
        known = sorted(file.stem for file in BUILTIN_FOLDER.glob("*.jsonl"))
        raise UserError(
            f"{key}: there is no built-in data set '{name}'; there are: {', '.join(known)}"
        )
    path = Path(text).expanduser()
    if path.is_file():
        return read_file(path, key)
    if files := matching_files(text):
        return chain.from_iterable(read_file(file, key) for file in files)
    if is_data_set(text):
        return _hub_rows(text, key)
    what, advice = missing_path(path)
    raise UserError(f"{key}: '{path}': {what}; {advice}")


def _hub_rows(name: str, key: str) -> Iterator[FileRow]:
    """A folder that `datasets` saved or can read, or an id on the hub, as
    `id:configuration:split`."""
    path, configuration, split = (*name.split(":"), "", "")[:3]
    folder = Path(path).expanduser()
    unreached = None if folder.is_dir() else unreachable()
    import datasets

    try:
        if any((folder / state).exists() for state in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(folder)
        else:
            if folder.is_dir():
                # only those of downloads are useful, not those of reading files
                datasets.disable_progress_bars()
            where = str(folder) if folder.is_dir() else path
            found = datasets.load_dataset(where, configuration or None)
        rows = _split_of(found, path, split, key)
        for number, values in enumerate(rows, 1):
            yield f"{name}, row {number}", values
    except UserError:
        raise
    except Exception as error:  # from `datasets`, readers, the network, or a data set's code
        cause = error.__cause__ or error  # `datasets` says only that one occurred
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        if folder.is_dir():
            reason += f"; name its files of data, e.g. {path}/*.jsonl"
        if unreached:
            reason = (
                f"there is no file or folder '{path}' in {Path.cwd()}, and the hub cannot be "
                f"reached ({unreached}): "
                "write the path of a file, or check the network (HF_ENDPOINT names a mirror, "
                "HTTPS_PROXY a proxy)"
            )
        raise UserError(f"{key}: the data set '{name}' cannot be loaded: {reason}") from error


def _split_of(found: Rows | dict[str, Rows], name: str, split: str, key: str) -> Rows:
    if not isinstance(found, dict):
        return found
    if split in found or (not split and len(found) == 1):
        return found[split or next(iter(found))]
    raise UserError(
        f"{key}: '{name}' has the splits {', '.join(found)}: name one, e.g. "
        f"{name}::{next(iter(found))}"
    )


def _fingerprint(texts: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{text}\n" for text in texts).encode()).hexdigest()


def _read_jsonl(path: Path) -> Iterator[FileRow]:
    with path.open("rb") as raw:
        file = _decompressed(raw, path) if is_compressed(path) else raw
        left = max(MAX_LIST_BYTES, 1000 * path.stat().st_size)
        for number, line in enumerate(lines_of(file), 1):
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if (left := left - len(line)) < 0 and file is not raw:
                raise OSError(EFBIG, "it expands to more than 1,000 times its size")
            if line.strip():
                yield f"{path}:{number}", read_line(line)


def _decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
    """The lines of a compressed file. Damage raises OSError when that place is read."""
    stream = pyarrow.CompressedInputStream(
        pyarrow.PythonFile(raw, mode="r"), COMPRESSIONS[path.suffix.lower()]
    )
    return BufferedReader(stream)


def read_line(line: bytes) -> Values | str:
    """The values of a JSON object, or why there are none."""
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except ValueError as error:
        return f"not JSON, one object on each line ({error})"
    except RecursionError:
        return "nested too deeply"
    if not isinstance(values, dict):
        return f"a JSON {type(values).__name__}, not an object"
    return values


def _read_json(path: Path) -> Iterator[FileRow]:
    """One list of objects; a `.json` file with an object on each line is read as JSONL."""
    with path.open("rb") as file:
        is_list = file.read(4096).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    if not is_list:
        yield from _read_jsonl(path)
        return
    size = path.stat().st_size
    if size > MAX_LIST_BYTES or count_values(text := path.read_bytes()) > MAX_JSON_VALUES:
        raise UserError(
            f"'{path}' is one list of {size:,} bytes, too large to be read at once: save it as "
            ".jsonl"
        )
    try:
        entries = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{path}' is not UTF-8 (byte {error.start + 1}): save it as UTF-8"
        ) from error
    except ValueError as error:
        raise UserError(f"'{path}' is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"'{path}' cannot be read: its JSON is nested too deeply") from error
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            entry = f"{type(entry).__name__}, not an object"
        yield f"{path}, entry {number}", entry


def _read_csv(path: Path) -> Iterator[FileRow]:
    """The first line names the columns; empty fields have no value."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with path.open("rb") as file:
        reader = csv.DictReader(iterdecode(lines_of(file), "utf-8-sig"), strict=True)
        try:
            for values in reader:
                yield f"{path}:{reader.line_num}", _read_fields(values)
        except UnicodeDecodeError as error:
            raise UserError(
                f"'{path}' is not UTF-8 (near line {reader.line_num + 1}): save it as UTF-8"
            ) from error
        except csv.Error as error:
            raise UserError(f"'{path}', line {reader.line_num}: not CSV: {error}") from error


def _read_fields(fields: dict[str | None, str | list[str] | None]) -> Values | str:
    """The values of a line's fields, or why it has none."""
    if isinstance(surplus := fields.get(None), list):
        return f"{len(surplus)} more fields than columns"
    values: dict[str, object] = {}
    for name, field in fields.items():
        if field is None:
            return f"no field for the column '{name}'"
        if field != "":
            values[str(name)] = field
    return values


def _read_parquet(path: Path) -> Iterator[FileRow]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        most = max(MAX_LIST_BYTES, 1000 * path.stat().st_size)
        size = 0
        for number in range(file.num_row_groups):
            size = max(size, file.metadata.row_group(number).total_byte_size)
        batches = file.iter_batches(batch_size=16) if size <= most else ()
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, values in enumerate(rows, 1):
            size += _ROW_BYTES + sum(len(each) for each in values.values() if isinstance(each, str))
            if size > most:
                break
            yield f"{path}, row {number}", values
        if size > most:
            raise ValueError(f"it expands to more than {most:,} bytes")
    except (pyarrow.ArrowException, ValueError) as error:  # a ValueError: a text in it is not UTF-8
        raise UserError(f"'{path}' is not Parquet, or damaged: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[FileRow]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


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
            "data.train_max_samples "
            "(data.val_max_samples) to the number of rows"
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
