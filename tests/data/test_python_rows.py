"""Rows given from Python: every kind becomes the same lines, and a resumed run trains on those it
began with."""

import itertools
import json
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest

from distflow.data.dataset_columns import Columns
from distflow.data.python_rows import keep_rows
from distflow.data.sources import load_rows
from distflow.errors import UserError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "2*3=", "answer": "6", "level": None},
]


def keep(given: object, folder: Path, wanted: int = -1, resuming: bool = False) -> list[dict]:
    file = folder / "train.jsonl"
    keep_rows(given, file, name="data", wanted=wanted, resuming=resuming)  # type: ignore[arg-type]
    return [json.loads(line) for line in file.read_text().splitlines()]


def message(given: object, folder: Path, **settings) -> str:
    with pytest.raises(UserError) as raised:
        keep(given, folder, **settings)
    return str(raised.value)


class Pairs:
    """Rows that are made while they are asked for, each time."""

    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        (row for row in ROWS),
        lambda: ROWS,
        lambda: iter(ROWS),
        Pairs(),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pandas.DataFrame(ROWS),
        [
            dict(zip(row, map(np.array, row.values()), strict=True)) if row["level"] else row
            for row in ROWS
        ],
    ],
    ids=lambda given: type(given).__name__,
)
def test_rows_of_every_kind_are_the_same(given: object, tmp_path: Path) -> None:
    assert keep(given, tmp_path) == ROWS
    (first, second) = load_rows(tmp_path / "train.jsonl", Columns())[0]
    assert (first.prompt, first.answer, first.extra_info) == ("1+1=", "2", {"level": 1})
    assert second.extra_info == {}


def test_nested_values_of_a_data_frame(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    frame = pandas.DataFrame(
        {"prompt": [messages], "reward_model": [{"ground_truth": "2"}], "x": [float("nan")]}
    )
    assert keep(frame, tmp_path) == [
        {"prompt": messages, "reward_model": {"ground_truth": "2"}, "x": None}
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no rows in the list"),
        (iter([]), "create a new one"),
        (["1+1="], "row 1 of the list is str, not a mapping"),
        ([ROWS[0], 3], "row 2 of the list is int"),
        (
            {"prompt": ["1+1="], "answer": ["2"]},
            "data is a dict of columns: give a list of rows, each a dict",
        ),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
            "give one, e.g. data=dataset['train']",
        ),
        (3, "is of type int: give a list of rows"),
        (lambda: 3, "gives int, which cannot be iterated over"),
    ],
)
def test_what_gives_no_rows_is_refused(given: object, said: str, tmp_path: Path) -> None:
    assert said in message(given, tmp_path) and not (tmp_path / "train.jsonl").exists()


def test_an_endless_iterator_needs_a_number(tmp_path: Path) -> None:
    endless = ({"prompt": str(i), "answer": i} for i in itertools.count())
    assert len(keep(endless, tmp_path, wanted=7)) == 7


def test_a_resumed_run_reads_what_it_began_with(tmp_path: Path) -> None:
    keep(iter(ROWS), tmp_path)
    never = (pytest.fail("it was read") for _ in range(1))
    assert keep(never, tmp_path, resuming=True) == ROWS  # an iterator may give other rows each time
    assert keep(list(ROWS), tmp_path, resuming=True) == ROWS
    assert "different rows than those that the run began with" in message(
        ROWS[:1], tmp_path, resuming=True
    )
    assert keep(ROWS[:1], tmp_path) == ROWS[:1], (
        "without a checkpoint it begins with what it is given"
    )
