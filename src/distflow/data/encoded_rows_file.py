"""Encoded rows as a file in the run's folder: written atomically, readable only by the owner, and
memory-mapped by every process that needs them.

The rows follow one another; then come their ends (int64), a header in JSON, and its size and the
checksum of both. A row is its checksum, the numbers of its prompt's and response's tokens (-1 for
none), their ids (int32), and the rest as JSON.
"""

import json
import mmap
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any, Final

from distflow.data.encoded_prompts import PromptRow, PromptRows, PromptSet
from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing
from distflow.untrusted_files import check_file

_FORMAT: Final = "prompts 6"
_CRC: Final = struct.Struct("<I")
_SIZES: Final = struct.Struct("<ii")
_TAIL: Final = struct.Struct("<II")
_REST: Final = (
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


def write_encoded(prompts: PromptSet, run_folder: Path, name: str) -> Path:
    """The file `data/NAME-FINGERPRINT.rows` of the run, written unless it exists. Raises
    OSError."""
    fingerprint = prompts.fingerprint()
    file = run_folder / "data" / f"{name}-{fingerprint[:12]}.rows"
    try:
        if EncodedRows(file).fingerprint() == fingerprint:
            return file
    except UserError:  # it is missing or torn
        pass
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ends = array("q")
    with replacing(file) as aside, aside.open("wb") as sink:
        for row in prompts:
            sink.write(_record(row))
            ends.append(sink.tell())
        header = json.dumps([_FORMAT, fingerprint, len(prompts), prompts.domains]).encode()
        tail = ends.tobytes() + header
        sink.write(tail + _TAIL.pack(len(header), zlib.crc32(tail)))
    return file


def _record(row: PromptRow) -> bytes:
    response = row.response_ids
    num_response = -1 if response is None else len(response)
    ids = array("i", (*row.prompt_ids, *(response or ())))
    body = ids.tobytes() + json.dumps([getattr(row, name) for name in _REST]).encode()
    checked = _SIZES.pack(len(row.prompt_ids), num_response) + body
    return _CRC.pack(zlib.crc32(checked)) + checked


class EncodedRows(PromptRows):
    """The rows of a `PromptSet` from `write_encoded`, each decoded when read. It is pickled as its
    path.

    domains: sorted, each once. Raises UserError if the file is not from `write_encoded`, or a row
    that is read has changed since it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            with check_file(path).open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            size, crc = _TAIL.unpack(self._memory[-_TAIL.size :])
            end = len(self._memory) - _TAIL.size
            header: Any = json.loads(self._memory[end - size : end])
            found, self._fingerprint, num_rows, self.domains = header
            start = end - size - 8 * num_rows
            if found != _FORMAT or zlib.crc32(self._memory[start:end]) != crc:
                raise ValueError("it is a different kind of file, or damaged")
        except (OSError, ValueError, TypeError, struct.error) as err:
            raise self._damaged(str(err)) from err
        self._ends = array("q")
        self._ends.frombytes(self._memory[start : end - size])

    def __reduce__(self) -> tuple[type["EncodedRows"], tuple[Path]]:
        return EncodedRows, (self.path,)

    def __len__(self) -> int:
        return len(self._ends)

    def fingerprint(self) -> str:
        """The fingerprint of the `PromptSet`."""
        return str(self._fingerprint)

    def _row(self, index: int) -> PromptRow:
        record = self._memory[self._ends[index - 1] if index else 0 : self._ends[index]]
        checked = record[_CRC.size :]
        if _CRC.pack(zlib.crc32(checked)) != record[: _CRC.size]:
            raise self._damaged(f"row {index} has changed since it was written")
        num_prompt, num_response = _SIZES.unpack_from(checked)
        body = checked[_SIZES.size :]
        num_ids = num_prompt + max(num_response, 0)
        ids = array("i")
        ids.frombytes(body[: 4 * num_ids])
        values = dict(zip(_REST, json.loads(body[4 * num_ids :]), strict=True))
        if values["turns"] is not None:
            values["turns"] = tuple((start, end) for start, end in values["turns"])
        if values["rejected_ids"] is not None:
            values["rejected_ids"] = tuple(values["rejected_ids"])
        values["images"] = tuple(values["images"])
        return PromptRow(
            index=index,
            prompt_ids=tuple(ids[:num_prompt]),
            response_ids=None if num_response < 0 else tuple(ids[num_prompt:]),
            **values,
        )

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f"the encoded data '{self.path}' cannot be used: {why}. Delete the file and restart "
            "the run, which writes it again"
        )
