"""Records of JSONL, JSON, CSV and Parquet files, each with its file and line; faults of a whole file are UserErrors."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from distflow.config.errors import UserError
from distflow.data.rows import Record


def read_file(path: Path, key: str) -> Iterator[Record]:
    """The records of a file, by its suffix. key: the config key that named it, for messages.

    Raises UserError where the file is of no known kind, cannot be opened, or is not what its suffix says.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{key}: '{path}' ends in '{path.suffix}'; known are {', '.join(READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise UserError(f"{key}: '{path}' cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _json_record(line, f"{path}:{number}")


def _json_record(line: bytes, origin: str) -> Record:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Record(origin, bad=f"not UTF-8 (byte {error.start + 1} of the line)")
    except ValueError as error:
        return Record(origin, bad=f"not JSON ({error})")
    except RecursionError:
        return Record(origin, bad="nested too deeply")
    if not isinstance(values, dict):
        return Record(origin, bad=f"a JSON {type(values).__name__}, not an object")
    return Record(origin, values)


def _read_json(path: Path) -> Iterator[Record]:
    """One list of objects; a `.json` file with an object on each line is read as JSONL."""
    with path.open("rb") as file:
        is_list = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if not is_list:
        yield from _read_jsonl(path)
        return
    try:
        entries = json.loads(path.read_text("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 (byte {error.start + 1}): save it as UTF-8") from error
    except ValueError as error:
        raise UserError(f"'{path}' is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"'{path}' cannot be read: its JSON is nested too deeply") from error
    for number, entry in enumerate(entries, 1):
        origin = f"{path}, entry {number}"
        is_object = isinstance(entry, dict)
        yield Record(origin, entry) if is_object else Record(origin, bad=f"{type(entry).__name__}, not an object")


def _read_csv(path: Path) -> Iterator[Record]:
    """The first line names the columns; a field that is empty has no value."""
    csv.field_size_limit(2**31 - 1)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for values in reader:
                yield _csv_record(values, f"{path}:{reader.line_num}")
        except UnicodeDecodeError as error:
            raise UserError(f"'{path}' is not UTF-8 (near line {reader.line_num + 1}): save it as UTF-8") from error
        except csv.Error as error:
            raise UserError(f"'{path}', line {reader.line_num}: not CSV: {error}") from error


def _csv_record(values: dict[str | None, str | list[str] | None], origin: str) -> Record:
    if isinstance(surplus := values.get(None), list):
        return Record(origin, bad=f"{len(surplus)} more fields than columns")
    short = [name for name, value in values.items() if value is None]
    if short:
        return Record(origin, bad=f"no field for the column '{short[0]}'")
    return Record(origin, {str(name): value for name, value in values.items() if value != ""})


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield Record(f"{path}, row {number}", values)
    except (pyarrow.ArrowException, ValueError) as error:  # a ValueError: a text in it is not UTF-8
        raise UserError(f"'{path}' is not Parquet, or damaged: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
