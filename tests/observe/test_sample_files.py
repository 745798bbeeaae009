"""Sample files: what comes back, their size, what damaged, newer and hostile ones do, and a writer
that no step waits for."""

import math
import random
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from distflow.errors import UserError
from distflow.observe import sample_files
from distflow.observe.run_reader import read_damage, read_metrics, read_samples
from distflow.observe.sample_files import (
    COLUMNS,
    DROPPED,
    SampleWriter,
    read_sample_file,
    write_sample_file,
)
from distflow.observe.writing.run_folder import RunFolder

MAX_BYTES = 16 * 2**20


def write(path: Path, rows: list[dict[str, object]], split: str = "train") -> Path:
    write_sample_file(path, rows, 3, split)
    return path


def test_a_row_comes_back_and_columns_say_the_rest(tmp_path):
    row: dict[str, object] = {
        "uid": "7-2",
        "prompt": "a\ud800",
        "response": "",
        "ground_truth": {"a": [1]},
        "score": math.nan,
        "acc": -math.inf,
        "reward_parts": {"math": math.inf, "why": "no"},
        "errors": None,
        "versions": [2, 3],
        "restart": 1,
        "t": 9.5,
        "conversation": [{"owner": "policy", "text": "x" * 1_000_000}],
        "loss": 0.5,
        "prompt_length": 10**30,
    }
    path = write(
        tmp_path / "samples" / "000003.parquet",
        [row, {"dropped": "all_equal", "score": True}],
        DROPPED,
    )
    (found, other), missing = read_sample_file(path, tmp_path)
    assert math.isnan(found.pop("score")) and missing == ""  # type: ignore[arg-type]
    assert found == {
        "uid": "7-2",
        "prompt": "a\\ud800",
        "response": "",
        "ground_truth": ('{"a": [1]}'),
        "acc": -math.inf,
        "reward_parts": {"math": "Infinity", "why": "no"},
        "errors": None,
        "versions": [2, 3],
        "restart": 1,
        "t": 9.5,
        "conversation": [{"owner": "policy", "text": "x" * 1_000_000}],
        "loss": 0.5,
        "advantage": None,
    }
    assert other["dropped"] == "all_equal" and other["score"] is None
    table = parquet.read_table(path)
    assert table.column_names == list(COLUMNS)
    derived = table.select(["step", "split", "group_id", "fate"]).to_pylist()
    assert derived[0] == {"step": 3, "split": "dropped", "group_id": 7, "fate": "dropped: None"}
    assert derived[1]["fate"] == "dropped: all_equal" and derived[1]["group_id"] is None


def test_one_call_reads_the_files_of_all_splits(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        run.samples(1, [{"uid": "0-0", "score": 1.0}])
        run.samples(1, [{"uid": "1-0", "dropped": "stale"}], DROPPED)
        run.samples(1, [{"uid": "0-0", "set": "val", "kind": "greedy"}], "val")

    rows = parquet.read_table(tmp_path / "samples").to_pylist()
    assert sorted((row["split"], row["fate"]) for row in rows) == [
        ("dropped", "dropped: stale"),
        ("train", "trained"),
        ("val", "validated"),
    ]
    assert all(abs(row["t"] - time.time()) < 600 for row in rows)


def text_of(draw: random.Random, words: list[str], number: int) -> str:
    return " ".join(words[min(int(draw.paretovariate(0.6)), len(words)) - 1] for _ in range(number))


def batch_of(number: int) -> list[dict[str, object]]:
    """Samples with 577 tokens each, about 430 words, of which 8 answer the same prompt."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(8000)]
    prompts = [text_of(draw, words, 60) for _ in range(number // 8)]
    return [
        {
            "uid": f"{i // 8}-{i % 8}",
            "prompt": prompts[i // 8],
            "response": text_of(draw, words, 430),
            "ground_truth": str(i // 8),
            "score": draw.random(),
            "acc": 1.0,
            "reward_parts": {"math": draw.random()},
            "extra": {"math/extracted": "42", "math/wanted": str(i)},
            "errors": None,
            "advantage": draw.gauss(0, 1),
            "prompt_length": 80,
            "response_length": 577,
            "finish_reason": "stop",
            "versions": [11, 12],
            "domain": "math",
            "masked": 0.0,
            "restart": 0,
            "t": 1.7e9 + i,
        }
        for i in range(number)
    ]


def test_512_samples_take_less_than_a_megabyte(tmp_path):
    path = write(tmp_path / "samples" / "000003.parquet", batch_of(512))
    assert path.stat().st_size < 1_000_000
    assert len(read_sample_file(path, tmp_path, MAX_BYTES)[0]) == 512


def test_a_truncated_file_is_said_and_hides_no_other(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for step in (1, 2):
            run.samples(step, [{"uid": f"{step}-{i}", "response": "r" * i} for i in range(20)])
        run.metrics(1, "train", {"x": 1.0})

    file = tmp_path / "samples" / "000001.parquet"
    whole = file.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:length])
        assert read_samples(tmp_path, 1) == [] and len(read_samples(tmp_path, 2)) == 20
        assert read_damage(tmp_path) == [
            "samples/000001.parquet is damaged: its samples are missing here"
        ]

    file.write_bytes(whole)
    assert len(read_samples(tmp_path, 1)) == 20 and read_damage(tmp_path) == []


def test_a_file_that_stands_for_far_more_than_it_holds_is_read_in_part(tmp_path):
    path = tmp_path / "samples" / "000001.parquet"
    number = 4096
    texts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * number, "int32"), pyarrow.array(["r" * 2**20])
    )
    table = pyarrow.table({"response": texts})
    path.parent.mkdir()

    with parquet.ParquetWriter(
        path, table.schema, compression="zstd", store_schema=False
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"distflow_schema": "1"})

    rows, said = read_sample_file(path, tmp_path)
    assert path.stat().st_size < 2**20 and 0 < len(rows) < 200
    assert said == (
        f"samples/000001.parquet is too long: {number - len(rows):,} of its samples are "
        "missing here"
    )


def test_a_part_of_a_step_is_read_where_the_whole_is_too_long(tmp_path):
    path = write(tmp_path / "samples" / "000003.parquet", batch_of(512))
    rows, said = read_sample_file(path, tmp_path, 600_000)
    assert 50 < len(rows) < 200 and said.startswith("samples/000003.parquet is too long: ")


def test_a_newer_version_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(sample_files, "SCHEMA_VERSION", 2)
        path = write(tmp_path / "samples" / "000003.parquet", [{"uid": "0-0"}])

    with pytest.raises(UserError, match=r"000003\.parquet' .* version 2 .* 1: "):
        read_sample_file(path, tmp_path)
    with RunFolder(tmp_path / "run", 0) as run:
        run.event("start", "restart 1 started", schema=2)
    with pytest.raises(UserError, match="run' .* version 2 "):
        read_metrics(tmp_path / "run")


def as_sample_file(path: Path, columns: dict[str, pyarrow.Array]) -> Path:
    table = pyarrow.table(columns).replace_schema_metadata({"distflow_schema": "1"})
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(table, path, compression="zstd", write_statistics=False)
    return path


def test_hostile_files_take_little(tmp_path):
    def repeated(text: str, number: int) -> pyarrow.Array:
        return pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * number, pyarrow.int32()), [text]
        )

    path = tmp_path / "samples" / "000001.parquet"
    for column, said in (
        ({"response": ["a" * 150_000_000]}, "1 of its samples"),
        ({"response": repeated("a" * 4_000_000, 100)}, "of its samples"),
        ({"response": repeated("", 1_000_000)}, "of its samples"),
    ):
        rows, missing = read_sample_file(as_sample_file(path, column), tmp_path, MAX_BYTES)
        assert len(rows) < 40_000 and said in missing and "too long" in missing

    deep = as_sample_file(
        path, {"extra": ["[" * 2000 + "]" * 2000], "score": ["x"], "uid": ["1-1"], "other": [1]}
    )
    assert read_sample_file(deep, tmp_path, MAX_BYTES)[0] == [
        {
            "extra": None,
            "uid": "1-1",
            "score": None,
            "acc": None,
            "errors": None,
            "advantage": None,
            "ground_truth": None,
            "restart": None,
        }
    ]
    parquet.write_table(pyarrow.table({"uid": ["0-0"]}), path)
    assert "it is no file of samples" in read_sample_file(path, tmp_path)[1]


def test_dropped_samples_of_a_step_gather_in_one_file(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for number in range(5):
            run.samples(2, [{"uid": f"{number}-0", "dropped": "stale"}], DROPPED)
            if number == 2:
                assert run.sample_writer.finish()
                assert [row["uid"] for row in read_samples(tmp_path, 2, DROPPED)] == [
                    "0-0",
                    "1-0",
                    "2-0",
                ]

        run.samples(3, [{"uid": "9-0"}], DROPPED)

    assert [row["uid"] for row in read_samples(tmp_path, 2, DROPPED)] == [
        f"{number}-0" for number in range(5)
    ]
    assert [row["uid"] for row in read_samples(tmp_path, 3, DROPPED)] == ["9-0"]


def test_what_waits_is_bounded_and_what_is_lost_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "_MAX_WAITING", 10_000)
    said: list[str] = []

    writer = SampleWriter(said.append)
    for step in range(3):
        writer.put(
            tmp_path / "samples" / f"{step}.parquet",
            [{"response": "r" * 20_000}] * 2,
            step,
            "train",
        )

    writer.put(tmp_path / "samples" / "small.parquet", [{"response": "r"}], 3, "train")
    writer.close()
    assert writer.num_lost == 6 and said == [
        "2 samples or more are not kept: the run is faster than its disk"
    ]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["small.parquet"]


def test_a_disk_that_fails_is_a_warning_and_no_error(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        (tmp_path / "samples").write_text("in the way")
        run.samples(1, [{"uid": "0-0"}] * 3)
        assert run.sample_writer.finish() and run.sample_writer.num_lost == 3

    assert (
        "3 samples or more are not kept: 000001.parquet cannot be written"
        in (tmp_path / "events.jsonl").read_text()
    )
