"""Encoded rows as Arrow files in the run's folder: written atomically, readable only by the owner,
and memory-mapped by every process that needs them."""

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path

import pyarrow

from distflow.data.encoded_prompts import PromptRow, PromptRows, PromptSet
from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing
from distflow.untrusted_files import check_file

CHUNK_ROWS = 1000
"""Rows of a record batch, which is read as a whole."""

_FORMAT = "prompts 5"
_IDS = pyarrow.list_(pyarrow.int32())
# All but ids and checksum is one JSON text, which keeps values exactly.
_SCHEMA = pyarrow.schema(
    {"prompt_ids": _IDS, "response_ids": _IDS, "rest": pyarrow.string(), "crc32": pyarrow.uint32()}
)

_REST = (
    "prompt_text",
    "ground_truth",
    "domain",
    "extra_info",
    "origin",
    "turns",
    "tag",
    "rejected_ids",
    "images",
)
"""The fields of a row in its JSON text, in order."""


def write_arrow(file: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]) -> None:
    """Write atomically. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        replacing(file) as aside,
        aside.open("wb") as sink,
        pyarrow.ipc.new_file(sink, schema) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)


def metadata_of(file: Path) -> Mapping[bytes, bytes]:
    """Metadata of the file's schema; empty if the file is missing, torn or not an Arrow file."""
    try:
        with pyarrow.memory_map(str(check_file(file))) as memory:
            return pyarrow.ipc.open_file(memory).schema.metadata or {}
    except (pyarrow.ArrowException, OSError):
        return {}


def write_encoded(prompts: PromptSet, run_folder: Path, name: str) -> Path:
    """The file `data/NAME-FINGERPRINT.arrow` of the run, written unless it exists. Raises
    OSError."""
    fingerprint = prompts.fingerprint()
    file = run_folder / "data" / f"{name}-{fingerprint[:12]}.arrow"
    header = json.dumps([_FORMAT, fingerprint, len(prompts), prompts.domains]).encode()
    metadata = {b"header": header, b"crc32": b"%d" % zlib.crc32(header)}
    if metadata_of(file) != metadata:
        schema = _SCHEMA.with_metadata(metadata)
        write_arrow(file, schema, _batches(prompts, schema))
    return file


class EncodedRows(PromptRows):
    """The rows of a `PromptSet` from `write_encoded`, each decoded when read. It is pickled as its
    path.

    domains: sorted, each once. Raises UserError if the file is not from `write_encoded`, or a row
    that is read has changed since it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._checked: dict[int, pyarrow.RecordBatch] = {}
        try:
            self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        except (pyarrow.ArrowException, OSError) as err:
            raise self._damaged(str(err)) from err
        metadata = self._reader.schema.metadata or {}
        header = metadata.get(b"header", b"")
        if metadata.get(b"crc32") != b"%d" % zlib.crc32(header) or not self._reader.schema.equals(
            _SCHEMA
        ):
            raise self._damaged("it is a different kind of file")
        found, self._fingerprint, self._num_rows, self.domains = json.loads(header)
        if found != _FORMAT:
            raise self._damaged(f"it is written as '{found}', not as '{_FORMAT}'")
        if self._reader.num_record_batches != -(-self._num_rows // CHUNK_ROWS):
            raise self._damaged(f"it should hold {self._num_rows} rows")

    def __reduce__(self) -> tuple[type["EncodedRows"], tuple[Path]]:
        return EncodedRows, (self.path,)

    def __len__(self) -> int:
        return self._num_rows

    def fingerprint(self) -> str:
        """The fingerprint of the `PromptSet`."""
        return str(self._fingerprint)

    def _row(self, index: int) -> PromptRow:
        prompt, response, rest, crc32 = (
            column[index % CHUNK_ROWS] for column in self._batch(index // CHUNK_ROWS)
        )
        prompt_ids = _ids_of(prompt.values)
        response_ids = _ids_of(response.values) if response.is_valid else None
        if crc32.as_py() != _crc32(prompt_ids, response_ids, rest.as_py()):
            raise self._damaged(f"row {index} has changed since it was written")
        values = dict(zip(_REST, json.loads(rest.as_py()), strict=True))
        if values["turns"] is not None:
            values["turns"] = tuple((start, end) for start, end in values["turns"])
        if values["rejected_ids"] is not None:
            values["rejected_ids"] = tuple(values["rejected_ids"])
        values["images"] = tuple(values["images"])
        return PromptRow(index=index, prompt_ids=prompt_ids, response_ids=response_ids, **values)

    def _batch(self, number: int) -> pyarrow.RecordBatch:
        """Read a record batch, after checking its offsets."""
        if number not in self._checked:
            try:
                batch = self._reader.get_batch(number)
                batch.validate(full=True)
            except (pyarrow.ArrowException, OSError) as err:
                raise self._damaged(f"near row {number * CHUNK_ROWS}: {err}") from err
            if batch.num_rows != min(CHUNK_ROWS, len(self) - number * CHUNK_ROWS):
                raise self._damaged(f"near row {number * CHUNK_ROWS}: {batch.num_rows} rows")
            self._checked[number] = batch
        return self._checked[number]

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f"the encoded data '{self.path}' cannot be used: {why}. Delete the file and restart "
            "the run, which "
            "writes it again"
        )


def _batches(prompts: PromptSet, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    for start in range(0, len(prompts), CHUNK_ROWS):
        rows = prompts[start : start + CHUNK_ROWS]
        texts: list[bytes] = []
        checksums: list[int] = []
        for row in rows:
            rest = json.dumps([getattr(row, name) for name in _REST])
            texts.append(rest.encode())
            checksums.append(_crc32(row.prompt_ids, row.response_ids, rest))
        memory = pyarrow.py_buffer(b"".join(texts))
        arrays = [
            _id_lists([row.prompt_ids for row in rows]),
            _id_lists([row.response_ids for row in rows]),
            pyarrow.Array.from_buffers(
                pyarrow.string(), len(texts), [None, _offsets(map(len, texts)), memory]
            ),
            _numbers("I", checksums),
        ]
        yield pyarrow.record_batch(arrays, schema=schema)


# Arrays are created from and read as buffers: `pyarrow.array` and `to_numpy` import pandas.


def _ids_of(values: pyarrow.Array) -> tuple[int, ...]:
    numbers = values.buffers()[1]
    if not numbers:
        return ()
    return tuple(memoryview(numbers).cast("i")[values.offset : values.offset + len(values)])


def _id_lists(rows: Sequence[Sequence[int] | None]) -> pyarrow.Array:
    ids = _numbers("i", chain.from_iterable(row or () for row in rows))
    # the first row's bit is the lowest
    present = sum(1 << i for i, row in enumerate(rows) if row is not None)
    bits = pyarrow.py_buffer(present.to_bytes(-(-len(rows) // 8), "little"))
    buffers = [bits, _offsets(len(row or ()) for row in rows)]
    return pyarrow.Array.from_buffers(_IDS, len(rows), buffers, children=[ids])


def _numbers(code: str, values: Iterable[int]) -> pyarrow.Array:
    """code: type code of `array`, "i" for int32 and "I" for uint32."""
    numbers = array(code, values)
    kind = pyarrow.int32() if code == "i" else pyarrow.uint32()
    return pyarrow.Array.from_buffers(kind, len(numbers), [None, pyarrow.py_buffer(numbers)])


def _offsets(lengths: Iterable[int]) -> pyarrow.Buffer:
    return pyarrow.py_buffer(array("i", accumulate(lengths, initial=0)))


def _crc32(prompt_ids: Sequence[int], response_ids: Sequence[int] | None, rest: str) -> int:
    """Checksum of a row's content. It starts with the number of prompt ids, so that no id can move
    to the response."""
    ids = array("i", (*prompt_ids, *(response_ids or ())))
    return zlib.crc32(rest.encode(), zlib.crc32(ids.tobytes(), len(prompt_ids)))
