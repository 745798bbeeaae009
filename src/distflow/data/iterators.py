"""Functions that give rows, which are written once to an Arrow file in the run folder: a resume reads the same."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

from distflow.config.errors import UserError
from distflow.config.functions import LoadError, load_function
from distflow.data.arrow import CHUNK_ROWS, metadata_of, write_arrow
from distflow.data.given import MAX_ROWS, json_lines
from distflow.data.rows import Record


def keep(target: str, file: Path, *, key: str, max_rows: int = MAX_ROWS, wanted: int = -1) -> Iterator[Record]:
    """The rows of the function that "module:function" or "file.py:function" names, read from `file`, which is written
    first unless it holds those already.

    wanted: stop after so many rows; -1 takes all, of which there may be `max_rows`.
    Raises UserError where there is no such function, and for rows that are none, as `json_lines` does.
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
