"""The ledger: an append-only journal of groups, versions and steps, `ledger.jsonl` in the run's
folder.

One JSON object per line: {"t": seconds since 1970, "restart": restart, "kind": ..., ...}. The kinds
that count groups:

    opened      ledger (its id)                          the first line
    plan        max_staleness, consumer_batch, quotas    of the run from here on: at its start and
    resumes; quotas:
                                                         share and lag of each domain at the next
                                                         step
    issued      group_id, epoch, row, version, attempt,  version: of the engine's weights; domain:
    if there are any
                domain
    assigned    group_id, worker                         the worker that runs it, if there are
    several
    complete    group_id, tokens, version                version: the lowest of any of its tokens
    lost        group_id                                 it was complete, and is to be issued again
    aborted     group_ids                                no longer needed by their step, to be
                                                         issued again
    dropped     group_id, reason
    consumed    step, group_ids, tokens
    version     step, weights                            step: the one that ends in it; weights: the
    step that made
                                                         them, less than `step` if none were sent
    inherited   step, issued, consumed, dropped, live,   counts of a checkpoint from another folder;
    live: group_id,
                domains, aborted                         attempt, complete, version, domain of
                groups in the queue;
                                                         domains: issued, consumed, dropped,
                                                         aborted; step: the last one
    rolled_back to (a byte offset)                       a resume: the records since `to` no longer
    hold

A record of kind issued, assigned or complete may be of several groups, rows of the data set that
were loaded together: then each of its lists has a value for each group (`by_group`). Steps are
counted from 1. Nothing is ever rewritten. Records of other kinds may be added; readers skip kinds
that they do not know.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from distflow.errors import UserError
from distflow.observe.ledger_groups import by_group
from distflow.untrusted_files import MAX_LINE_BYTES, lines_of, open_file

_encode = json.JSONEncoder(separators=(",", ":")).encode

Record = dict[str, Any]
"""A line; its fields by kind are listed above."""


STALE = "stale"
"""The reason to drop a complete group that exceeds the staleness bound of the resumed run."""


@dataclass(frozen=True)
class Mark:
    """A position in a ledger, to which a resume rolls back. offset: bytes."""

    ledger: str
    offset: int
    restart: int


_NEW_LEDGER = "Resume into an empty folder (trainer.default_local_dir), which starts a new ledger"


class LedgerError(UserError):
    """A ledger that cannot be read: it is damaged, or not a ledger."""


class Ledger(AbstractContextManager["Ledger"]):
    """The only writer of a ledger. Each record reaches the operating system at once, the disk at
    `sync`; the caller must sync the name of a new file.

    mark: of the checkpoint that the run resumes from; None for a new run. An existing ledger is
    rolled back to it. If the mark is of another ledger, this one starts empty and `inherits` is
    True.
    """

    def __init__(self, path: Path, mark: Mark | None = None) -> None:
        self.path = path
        self.restart = mark.restart + 1 if mark else 0

        first = _first_line(path)
        if not first.endswith(b"\n") and _parse(first) is None:
            self._start(mark)
        else:
            self._reopen(mark)

    def append(self, kind: str, **fields: object) -> None:
        self.append_all(kind, [fields])

    def append_all(
        self, kind: str, fields: Sequence[Mapping[str, object]], as_one: bool = False
    ) -> None:
        """Append records of one kind together. fields: of each. as_one: write one record of all
        groups."""
        head = {"t": round(time.time(), 3), "restart": self.restart, "kind": kind}
        if as_one and len(fields) > 1:
            fields = [{name: [each[name] for each in fields] for name in fields[0]}]
        lines = []
        for each in fields:
            lines.append(_encode({**head, **each}) + "\n")
        self._file.write("".join(lines).encode())
        self._file.flush()

    def sync(self) -> None:
        """Return when all records are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def mark(self) -> Mark:
        """The position after the last record."""
        return Mark(self.id, self._file.tell(), self.restart)

    def close(self) -> None:
        with self._file:
            self.sync()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        """Close the file. A failure to write the last records is raised only if nothing failed
        before."""
        try:
            self.close()
        except OSError:
            if error is None:
                raise

    def _start(self, mark: Mark | None) -> None:
        self.id = secrets.token_hex(8)
        self.inherits = mark is not None
        self._file: BinaryIO = os.fdopen(
            os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
        )
        self.append("opened", ledger=self.id)

    def _reopen(self, mark: Mark | None) -> None:
        if (first := _parse(_first_line(self.path))) is None:
            raise LedgerError(
                f"{self.path} is not a ledger: its first line is not a record. Move it away"
            )

        self.id = str(first.get("ledger"))
        self.inherits = mark is not None and mark.ledger != self.id

        to = mark.offset if mark and not self.inherits else 0
        if to > self.path.stat().st_size:
            raise LedgerError(
                f"{self.path} ends before byte {to}, where the checkpoint was saved: lines were "
                f"removed. {_NEW_LEDGER}"
            )

        try:
            for _ in timeline(self.path, to):
                pass
        except LedgerError as err:
            raise LedgerError(f"{err}: two runs may have written to it. {_NEW_LEDGER}") from err

        self._file = self.path.open("a+b")
        self._file.seek(to)
        later = (record["restart"] + 1 for line in self._file if (record := _parse(line)))
        self.restart = max([self.restart, *later])
        self._file.seek(-1, os.SEEK_END)
        if self._file.read() != b"\n":
            self._file.write(b"\n")
        self.append("rolled_back", to=to)
        self.sync()


def ledger_id(path: Path) -> str | None:
    """The id in a ledger's first line; None if there is no such line."""
    first = _parse(_first_line(path))
    if first and "ledger" in first:
        return str(first["ledger"])
    return None


def timeline(path: Path, end: int | None = None) -> Iterator[tuple[int, Record]]:
    """(byte offset, record) of the valid records, which no later `rolled_back` revoked, one for
    each group that was issued or completed. end: read only those before it.

    A torn line from a killed writer is skipped. Raises LedgerError for any other damage of valid
    records.
    """
    stop = sys.maxsize if end is None else end
    spans: list[tuple[int, int]] = []
    for position, to in reversed(list(_rollbacks(path))):
        if position < stop:
            spans.append((position, stop))
            stop = to

    for span in reversed([*spans, (0, stop)]):
        for offset, record in _records(path, *span):
            if record["kind"] in ("issued", "assigned", "complete"):
                yield from ((offset, dict(each)) for each in by_group(record))
            else:
                yield offset, record


def surviving_records(path: Path) -> Iterator[Record]:
    """The records of `timeline`; none if there is no ledger. Raises LedgerError, also if it cannot
    be read."""
    try:
        if path.is_file():
            yield from (record for _, record in timeline(path))
    except OSError as err:
        raise LedgerError(f"'{path}' cannot be read: {err.strerror}") from err


def _records(path: Path, start: int, stop: int) -> Iterator[tuple[int, Record]]:
    """The records of a part of the file, with their offsets. Only the end of the file may be
    torn."""
    offset = start
    torn = None
    with _opened(path) as file:
        file.seek(start)
        for line in lines_of(file, stop - start):
            record = _parse(line)
            if record is None:
                torn = offset if torn is None else torn
            elif torn is None:
                yield offset, record
            else:
                break

            offset += len(line)

    if torn is not None and (record is not None or offset == stop):
        raise LedgerError(f"{path} is damaged at byte {torn}: a line in the middle is not a record")


def _rollbacks(path: Path) -> Iterator[tuple[int, int]]:
    """(offset, to) of each rollback. Other lines are not parsed, which takes a tenth of the
    time."""
    offset = 0
    with _opened(path) as file:
        for line in lines_of(file):
            if (
                b"rolled_back" in line
                and (record := _parse(line))
                and record["kind"] == "rolled_back"
            ):
                yield offset, record["to"]

            offset += len(line)


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line.decode())  # faster than bytes, for which json guesses the encoding
    except (ValueError, RecursionError):
        return None

    is_record = (
        isinstance(record, dict)
        and isinstance(record.get("kind"), str)
        and isinstance(record.get("restart"), int)
    )
    return record if is_record else None


def _first_line(path: Path) -> bytes:
    """The first line; empty if there is no file."""
    if not path.exists():
        return b""
    with _opened(path) as file:
        return file.readline(MAX_LINE_BYTES)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_file(path, path.parent)
    except OSError as err:
        raise LedgerError(f"'{path}' cannot be read: {err.strerror}. Move it away") from err
