"""From what `data.train_files` names to rows: files, data sets of Hugging Face `datasets`, built-in ones, functions.

Each record of a JSONL, JSON, CSV or Parquet file has its file and line; a fault of a whole file is a UserError. Rows of
a function are written once to an Arrow file in the run's folder, so that a resumed run reads the same.
"""

import csv
import functools
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import pyarrow

from distflow.config.compose.check_paths import HUB_DATA
from distflow.data import reasoning_gym, verifiers_tasks
from distflow.data.dataset_columns import BadRows, Columns, RawRow, Record, read_rows
from distflow.data.encoded import CHUNK_ROWS, metadata_of, write_arrow
from distflow.data.python_rows import MAX_ROWS, json_lines
from distflow.errors import UserError, missing_path
from distflow.import_target import LoadError, load_function

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
REACHED_WITHIN_S = 4.0
"""The hub's client itself retries for most of a minute."""
_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|.*\.py):[A-Za-z_]\w*")

Source = str | Path
Rows = Iterable[Mapping[str, object]]


def load_rows(
    sources: Source | Sequence[Source],
    columns: Columns,
    *,
    key: str = "data.train_files",
    bad_rows: str = "error",
    max_samples: int = -1,
    run_folder: Path | None = None,
    max_iterator_rows: int = MAX_ROWS,
) -> tuple[list[RawRow], BadRows]:
    """All good rows, in the order of the sources, and what was wrong with the others.

    sources: one or a list of
      - a `.jsonl`, `.json`, `.csv` or `.parquet` file;
      - a folder that `datasets` can read, or an id on the hub, with its configuration and split where there are
        several: `openai/gsm8k:main:train`, `folder::train`;
      - `builtin:NAME`, which ships with the package;
      - `reasoning-gym:NAME?size=100&seed=7`, which that package makes, `verifiers:ID`, a taskset of that package;
      - "module:function" or "file.py:function" that gives mappings.
    key: the config key that named them, for messages. bad_rows: "error" or "skip". max_samples: rows in all, -1 for
    all. run_folder: where the rows of Python code are kept; needed for them.
    Raises UserError for whatever cannot be read, for bad rows unless skipped, and for no rows at all.
    """
    bad = BadRows(bad_rows)
    rows: list[RawRow] = []
    listed = [sources] if isinstance(sources, str | Path) else sources
    name = key.removeprefix("data.").removeprefix("domains.")  # `train_files`, or `NAME.train_files` of a domain
    for number, source in enumerate(listed):
        wanted = -1 if max_samples < 0 else max_samples - len(rows)
        if wanted == 0:
            break
        file = run_folder / "data" / f"{name}-{number}.arrow" if run_folder is not None else None
        records = _records(source, key, file, max_iterator_rows, wanted)
        found = read_rows(records, columns, bad, f"'{source}'")
        rows.extend(found if wanted < 0 else islice(found, wanted))
    bad.check()
    if not rows:
        skipped = f" ({len(bad.reasons)} bad ones skipped, the first: {bad.reasons[0]})" if bad.reasons else ""
        named = ", ".join(f"'{source}'" for source in listed)
        raise UserError(f"{key}: no rows in {named or 'an empty list'}{skipped}")
    return rows, bad


def forget_rows(run_folder: Path) -> None:
    """Remove the rows of functions that `load_rows` stored: a new run calls the functions again."""
    for kept in (run_folder / "data").glob("*_files-*.arrow"):
        kept.unlink()


def is_function(source: str) -> bool:
    """Whether the source names a function that `load_rows` imports and calls, not a data set with a similar name."""
    if source.startswith(("builtin:", verifiers_tasks.PREFIX)) or not _FUNCTION.fullmatch(source):
        return False
    return not (Path(source).expanduser().is_file() or Path(source.partition(":")[0]).expanduser().is_dir())


def keep(target: str, file: Path, *, key: str, max_rows: int = MAX_ROWS, wanted: int = -1) -> Iterator[Record]:
    """The rows of the function "module:function" or "file.py:function", read from `file`, which is written first unless
    it holds them already.

    wanted: stop after so many rows; -1 takes all, at most `max_rows`. Raises UserError if there is no such function,
    and for values that are not rows, see `json_lines`.
    """
    source = f"'{target}'"
    identity = source if wanted < 0 else f"{source}, first {wanted}"
    try:
        function = cast(Callable[[], object], load_function(target))
    except LoadError as error:
        raise UserError(f"{key}: {error}") from error
    if metadata_of(file).get(b"source") != identity.encode():
        _write(json_lines(function(), source=source, key=key, max_rows=max_rows, wanted=wanted), file, identity)
    return _read(file, source, key)


def read_file(path: Path, key: str) -> Iterator[Record]:
    """The records of a file, by its suffix. key: the config key that named it, for messages.

    Raises UserError if the file is of an unknown kind, cannot be opened, or has other content than its suffix says.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{key}: '{path}' ends in '{path.suffix}'; known are {', '.join(READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise UserError(f"{key}: '{path}' cannot be read: {error.strerror or error}") from error


@functools.cache
def unreachable() -> str | None:
    """Why the hub cannot be reached from here; None if it can. Checked once.

    If not, the libraries that read from it are set to offline mode: cached data still load.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(getproxies().get("https") or constants.ENDPOINT)
    reason = _connects(url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    if reason is not None:
        constants.HF_HUB_OFFLINE = True
        import datasets.config

        datasets.config.HF_HUB_OFFLINE = True
    return reason


def _records(source: Source, key: str, kept: Path | None, max_rows: int, wanted: int) -> Iterator[Record]:
    text = str(source)
    if is_function(text):
        if kept is None:
            raise UserError(f"{key}: rows of a function need a run's folder (trainer.default_local_dir) to be kept in")
        return keep(text, kept, key=key, max_rows=max_rows, wanted=wanted)
    if text.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.read_records(text, key, wanted)
    if text.startswith(verifiers_tasks.PREFIX):
        return verifiers_tasks.read_records(text, key, wanted)
    if text.startswith("builtin:"):
        return read_file(_builtin(text.removeprefix("builtin:"), key), key)
    path = Path(text).expanduser()
    if path.is_file():
        return read_file(path, key)
    if Path(text.partition(":")[0]).expanduser().is_dir():
        return _hub_records(text, key)
    if HUB_DATA.fullmatch(text) and path.suffix.lower() not in READERS:
        return _hub_records(text, key)
    what, advice = missing_path(path)
    raise UserError(f"{key}: '{path}': {what}; {advice}")


def _builtin(name: str, key: str) -> Path:
    path = BUILTIN_FOLDER / f"{name}.jsonl"
    if not path.is_file():
        known = sorted(file.stem for file in BUILTIN_FOLDER.glob("*.jsonl"))
        raise UserError(f"{key}: there is no built-in data set '{name}'; there are: {', '.join(known) or 'none'}")
    return path


def _hub_records(name: str, key: str) -> Iterator[Record]:
    """A folder that `datasets` saved or can read, or an id on the hub, as `id:configuration:split`."""
    path, configuration, split = (*name.split(":"), "", "")[:3]
    folder = Path(path).expanduser()
    unreached = None if folder.is_dir() else unreachable()
    import datasets

    try:
        if any((folder / state).exists() for state in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(folder)
        else:
            if folder.is_dir():
                datasets.disable_progress_bars()  # a download's are of use, those of reading files are not
            found = datasets.load_dataset(str(folder) if folder.is_dir() else path, configuration or None)
        rows = _split_of(found, path, split, key)
        for number, values in enumerate(rows, 1):
            yield Record(f"{name}, row {number}", values)
    except UserError:
        raise
    except Exception as error:  # of `datasets`, of readers, the network, or a data set's code
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if unreached:
            reason = (
                f"there is no file or folder '{path}' in {Path.cwd()}, and the hub cannot be reached ({unreached}): "
                "write the path of a file, or see to the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy)"
            )
        raise UserError(f"{key}: the data set '{name}' cannot be loaded: {reason}") from error


def _split_of(found: Rows | dict[str, Rows], name: str, split: str, key: str) -> Rows:
    if not isinstance(found, dict):
        return found
    if split in found or (not split and len(found) == 1):
        return found[split or next(iter(found))]
    raise UserError(f"{key}: '{name}' has the splits {', '.join(found)}: name one, e.g. {name}::{next(iter(found))}")


def _write(texts: list[str], file: Path, identity: str) -> None:
    """One column of JSON texts; the schema's metadata hold what they are and their fingerprint."""
    table = pyarrow.table({"row": pyarrow.array(texts, pyarrow.string())})
    table = table.replace_schema_metadata({"source": identity, "fingerprint": _fingerprint(texts)})
    write_arrow(file, table.schema, table.to_batches(max_chunksize=CHUNK_ROWS))


def _fingerprint(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def _read(file: Path, source: str, key: str) -> Iterator[Record]:
    with pyarrow.memory_map(str(file)) as memory:
        reader = pyarrow.ipc.open_file(memory)
        texts = [
            text for index in range(reader.num_record_batches) for text in reader.get_batch(index)["row"].to_pylist()
        ]
        expected = reader.schema.metadata[b"fingerprint"].decode()
    if _fingerprint(texts) != expected:
        raise UserError(f"{key}: '{file}' is damaged: delete it, and {source} is read again")
    for number, text in enumerate(texts, 1):
        yield Record(f"{source}, row {number}", json.loads(text))


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


def _connects(host: str, port: int) -> str | None:
    """Why it cannot be reached. A name look-up has no timeout: it is left running on its thread."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=REACHED_WITHIN_S).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    thread = threading.Thread(target=connect, name="distflow-hub", daemon=True)
    thread.start()
    thread.join(REACHED_WITHIN_S)
    answer = outcome[0] if outcome else f"no answer within {REACHED_WITHIN_S:g} s"
    return answer and f"{host}: {answer}"
