"""Rows that are read one at a time, against the reader of whole files."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from distflow.data.rows_on_demand import index_file
from distflow.data.sources import read_file
from distflow.errors import UserError

KEY = "data.train_files"


def odd_lines(seed: int) -> bytes:
    """Lines as people have them: blank ones, ends of Windows, other scripts, a mark of the
    encoding, bad ones."""
    draw = random.Random(seed)
    lines = list[bytes]()
    for number in range(draw.randrange(1, 60)):
        row = json.dumps(
            {"prompt": "äß𝔘" * draw.randrange(4) + str(number)}, ensure_ascii=draw.random() < 0.5
        ).encode()
        lines.append(draw.choice([row, row, row, b"", b"  \t", b"[1]", b"{", b"\xff", b" " + row]))

    ends = [draw.choice([b"\n", b"\r\n"]) for _ in lines]
    text = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    return draw.choice([b"", b"\xef\xbb\xbf"]) + (
        text if draw.random() < 0.5 else text.rstrip(b"\r\n")
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_line_is_the_one_that_the_whole_file_has(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(odd_lines(seed))
    whole = list(read_file(file, KEY))
    found = index_file(file, tmp_path / "data", KEY)
    assert found.num_rows == len(whole)
    order = random.Random(seed).sample(range(len(whole)), len(whole))
    assert [found.row(index) for index in order] == [whole[index] for index in order]


def test_any_row_of_any_row_group_is_the_one_that_the_whole_file_has(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = [{"prompt": f"{i}", "nested": {"a": [i] * (i % 3)}} for i in range(23)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=5)
    whole = list(read_file(file, KEY))
    found = index_file(file, tmp_path, KEY)
    assert [found.row(index) for index in range(found.num_rows)] == whole and len(whole) == 23


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_fingerprint_is_of_the_content_and_not_of_the_place(
    tmp_path: Path, suffix: str
) -> None:
    def write(name: str, last: str) -> Any:
        file = tmp_path / f"{name}{suffix}"
        rows = [{"prompt": "a"}, {"prompt": last}]

        if suffix == ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)

        return index_file(file, tmp_path, KEY)

    assert (
        write("one", "b").fingerprint
        == write("two", "b").fingerprint
        != write("three", "c").fingerprint
    )


def test_a_file_that_has_changed_since_or_is_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    found = index_file(file, tmp_path, KEY)
    file.write_text('{"prompt": "longer"}\n{"prompt": "b"}\n')

    with pytest.raises(UserError, match=r"row 2 of .*rows\.jsonl' .* changed"):
        found.row(1)

    other = tmp_path / "rows.csv"
    other.write_text("prompt\na\n")

    with pytest.raises(
        UserError,
        match=r"data\.train_files: .*rows\.csv'.*data\.lazy=false",
    ):
        index_file(other, tmp_path, KEY)
