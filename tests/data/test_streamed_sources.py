"""Rows that are read forward: the same whatever they are read from, numbered on from pass to
pass."""

import gzip
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pytest

from distflow.data import rows_on_demand, sources
from distflow.data.dataset_columns import Columns
from distflow.data.rows_on_demand import RowStream, is_streamed
from distflow.errors import UserError


def lines(numbers: Sequence[int]) -> bytes:
    return b"".join(
        json.dumps({"prompt": str(number), "answer": "7"}).encode() + b"\n" for number in numbers
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten rows over three files, of which one has gzip members as `cat` joins them."""
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(lines(range(2))) + gzip.compress(lines(range(2, 5)))
    )
    with pyarrow.output_stream(str(tmp_path / "b.ndjson.zst"), compression="zstd") as file:
        file.write(lines(range(5, 7)))
    (tmp_path / "c.jsonl").write_bytes(lines(range(7, 10)))
    return tmp_path


def numbers(stream: RowStream, indices: Sequence[int]) -> list[int]:
    return [int(str(stream.row(index)[1]["prompt"])) for index in indices]


def test_rows_are_numbered_on_from_pass_to_pass(folder: Path) -> None:
    stream = RowStream([f"{folder}/*"], "data.train_files", -1)
    assert numbers(stream, range(25)) == [*range(10), *range(10), *range(5)]
    assert stream.row(13)[0] == f"{folder}/a.jsonl.gz:4"
    assert numbers(RowStream([f"{folder}/*"], "data.train_files", 4), [6, 0, 3, 4]) == [2, 0, 3, 0]
    assert numbers(pickle.loads(pickle.dumps(stream)), [21, 3]) == [1, 3]


def test_rows_that_are_not_held_any_more_are_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_on_demand, "NUM_FIRST", 2)
    monkeypatch.setattr(rows_on_demand, "NUM_HELD", 3)
    stream = RowStream([f"{folder}/*"], "data.train_files", -1)
    order = [9, 0, 8, 3, 4, 27, 25, 12, 1, 26, 5, 24]
    assert numbers(stream, order) == [index % 10 for index in order]


def test_a_fault_in_the_middle_is_not_the_end(folder: Path) -> None:
    stream = RowStream([f"{folder}/*"], "data.train_files", -1)
    whole = (folder / "b.ndjson.zst").read_bytes()
    (folder / "b.ndjson.zst").write_bytes(whole[:-9])
    for _ in range(2):
        with pytest.raises(UserError, match=r"b.ndjson.zst' cannot be read"):
            stream.row(8)
    (folder / "b.ndjson.zst").write_bytes(whole)
    assert numbers(stream, [8, 12]) == [8, 2]


def test_without_a_row_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl.gz").write_bytes(gzip.compress(b"\n"))
    with pytest.raises(UserError, match="data.train_files: no rows in .*none.jsonl.gz"):
        RowStream([f"{tmp_path}/none.jsonl.gz"], "data.train_files", -1).row(0)


def test_the_first_rows_are_its_fingerprint(folder: Path) -> None:
    before = RowStream([f"{folder}/*"], "data.train_files", -1).fingerprint
    assert (
        RowStream([str(file) for file in sorted(folder.iterdir())], "data.x", -1).fingerprint
        == before
    )
    assert RowStream([f"{folder}/[bc]*"], "data.train_files", -1).fingerprint != before


def test_what_is_read_forward(folder: Path) -> None:
    forward = (f"{folder}/*.jsonl", f"{folder}/a.jsonl.gz", str(folder), "openai/gsm8k:main:train")
    assert [is_streamed(source) for source in forward] == [True] * 4
    others = (
        f"{folder}/c.jsonl",
        "builtin:sums",
        "reasoning-gym:chain_sum?size=3",
        "rows.py:rows",
        f"{folder}/*.csv",
    )
    assert [is_streamed(source) for source in others] == [False] * 5


def test_patterns_and_compressed_lines_are_read_at_the_start_too(folder: Path) -> None:
    rows, _ = sources.load_rows([f"{folder}/*"], Columns(answer_required=False))
    assert [row.prompt for row in rows] == [str(number) for number in range(10)]


def test_a_file_that_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LIST_BYTES", 1000)
    with pyarrow.output_stream(str(tmp_path / "bomb.jsonl.zst"), compression="zstd") as file:
        file.write((b" " * 9999 + b"\n") * 500)
    with pytest.raises(
        UserError, match=r"bomb.jsonl.zst' cannot be read: it expands to more than 1,000 times"
    ):
        sources.load_rows(tmp_path / "bomb.jsonl.zst", Columns())
