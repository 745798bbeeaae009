"""Data sets given as Python code: written once to an Arrow file in the run folder, so that a resume reads the same."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from distflow.config.errors import UserError
from distflow.config.functions import LoadError, load_function
from distflow.data.arrow import CHUNK_ROWS, metadata_of, write_arrow
from distflow.data.rows import Record, plain

MAX_ROWS = 1_000_000


def from_function(target: str, key: str) -> Callable[[], Iterable[object]]:
    """The function that "module:function" or "file.py:function" names. Raises UserError where there is none."""
    try:
        return cast(Callable[[], Iterable[object]], load_function(target))
    except LoadError as error:
        raise UserError(f"{key}: {error}") from error


def keep(
    make_rows: Callable[[], Iterable[object]],
    file: Path,
    *,
    source: str,
    key: str,
    max_rows: int = MAX_ROWS,
    wanted: int = -1,
) -> Iterator[Record]:
    """The rows of an iterator, read from `file`, which is written first unless it holds those of `source` already.

    wanted: stop after so many rows; -1 takes all, of which there may be `max_rows`.
    Raises UserError for an iterator with more, for rows that are no mappings or that JSON cannot hold.
    """
    identity = source if wanted < 0 else f"{source}, first {wanted}"
    if metadata_of(file).get(b"source") != identity.encode():
        texts = _as_json(make_rows(), source=source, key=key, max_rows=max_rows, wanted=wanted)
        _write(texts, file, identity)
    return _read(file, source, key)


def _as_json(rows: Iterable[object], *, source: str, key: str, max_rows: int, wanted: int) -> list[str]:
    """Each row as one JSON text: exact, whatever its types."""
    try:
        taken = itertools.islice(iter(rows), wanted if wanted >= 0 else max_rows + 1)
    except TypeError:
        raise UserError(f"{key}: {source} gives {type(rows).__name__}, which cannot be iterated over") from None
    texts: list[str] = []
    for row in taken:
        if not isinstance(row, Mapping):
            raise UserError(
                f"{key}: row {len(texts) + 1} of {source} is {type(row).__name__}, not a mapping from columns to values"
            )
        texts.append(json.dumps(plain(row)))
    if wanted < 0 and len(texts) > max_rows:
        raise UserError(
            f"{key}: {source} gave more than {max_rows:,} rows; is it endless? "
            "Set data.train_max_samples (data.val_max_samples) to the number wanted"
        )
    return texts


def _write(texts: list[str], file: Path, identity: str) -> None:
    """One column of JSON texts; the schema's metadata hold what they are and their fingerprint."""
    import pyarrow

    table = pyarrow.table({"row": pyarrow.array(texts, pyarrow.string())})
    table = table.replace_schema_metadata({"source": identity, "fingerprint": _fingerprint(texts)})
    write_arrow(file, table.schema, table.to_batches(max_chunksize=CHUNK_ROWS))


def _fingerprint(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def _read(file: Path, source: str, key: str) -> Iterator[Record]:
    import pyarrow

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
