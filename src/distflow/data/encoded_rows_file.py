"""Encoded rows as a file in the run's folder: written atomically, readable only by the owner, and
memory-mapped by every process that needs them.

A line is the checksum of JSON, and the JSON: of a header, and of each row.
"""

import json
import mmap
import zlib
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Final

from distflow.data.encoded_prompts import PromptRow, PromptRows, PromptSet, read_line
from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing
from distflow.untrusted_files import check_file

_FORMAT: Final = "prompts 7"


def write_encoded(prompts: PromptSet, run_folder: Path, name: str) -> Path:
    """The file `data/NAME-FINGERPRINT.rows` of the run, written unless it exists. Raises
    OSError."""
    fingerprint = prompts.fingerprint()
    file = run_folder / "data" / f"{name}-{fingerprint[:12]}.rows"

    with suppress(UserError):  # it is missing or torn
        if EncodedRows(file).fingerprint() == fingerprint:
            return file

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    header = json.dumps([_FORMAT, fingerprint, len(prompts), prompts.domains]).encode()

    with replacing(file) as aside, aside.open("wb") as sink:
        for line in (header, *prompts.lines):
            sink.write(b"%08x %b\n" % (zlib.crc32(line), line))

    return file


class EncodedRows(PromptRows):
    """The rows of a `PromptSet` from `write_encoded`, each decoded when read. It is pickled as its
    path.

    domains: sorted, each once. Raises UserError if the file is not from `write_encoded`, or a row
    that is read has changed since it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._ends = array("q")
        """The end of each line, the header's first."""

        try:
            with check_file(path).open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            while (end := self._memory.find(b"\n", self._start(len(self._ends)))) >= 0:
                self._ends.append(end)
            found, self._fingerprint, num_rows, self.domains = json.loads(self._line(0))
            if (found, num_rows) != (_FORMAT, len(self)):
                raise ValueError("it is a different kind of file, or damaged")
        except (OSError, ValueError, IndexError) as error:
            raise self._damaged(str(error)) from error

    def __reduce__(self) -> tuple[type["EncodedRows"], tuple[Path]]:
        return EncodedRows, (self.path,)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def fingerprint(self) -> str:
        """The fingerprint of the `PromptSet`."""
        return str(self._fingerprint)

    def _row(self, index: int) -> PromptRow:
        try:
            return read_line(self._line(index + 1), index)
        except ValueError as error:
            raise self._damaged(f"row {index} {error}") from error

    def _start(self, number: int) -> int:
        return self._ends[number - 1] + 1 if number else 0

    def _line(self, number: int) -> bytes:
        """The JSON of a line. Raises ValueError if it has changed."""
        line = self._memory[self._start(number) : self._ends[number]]
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ValueError("has changed since it was written")
        return text

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f"the encoded data '{self.path}' cannot be used: {why}. Delete the file and restart "
            "the run, which writes it again"
        )
