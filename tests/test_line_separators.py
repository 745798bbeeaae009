"""U+2028, U+2029 and U+0085 separate lines for `str.splitlines`, but are valid inside a JSON
record: each reader of records finds whole ones."""

import json
from pathlib import Path

import pytest

from distflow.data.rows_on_demand import index_file
from distflow.data.sources import read_file

TEXT = "one\u2028two\u2029three\u0085four\x0bfive\x1csix"


def lines(path: Path, *records: object) -> Path:
    path.write_text(
        "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_file_of_data(suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    lines(path, {"prompt": TEXT}, {"prompt": "b"}) if suffix == "jsonl" else lines(
        path, [{"prompt": TEXT}]
    )
    assert next(iter(read_file(path, "data.train_files")))[1]["prompt"] == TEXT
    assert suffix == "json" or index_file(path, tmp_path, "data.train_files").num_rows == 2
