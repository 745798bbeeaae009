"""What verifiers say besides a score stays within bounds, whatever it is."""

import json
import math
from typing import Any

import pytest

from distflow.rewards.reward_results import MAX_IN_ALL, MAX_TEXT, read_score


def bounded(remarks: dict[str, Any]) -> dict[str, Any]:
    return read_score({"score": 1.0, **remarks}).extra


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10_000_000,
        ["x" * 3000] * 100_000,
        {str(i): ["y" * 900] * 40 for i in range(1000)},
        {"k" * 100_000: 1},
        10**100_000,
        b"z" * 5_000_000,
        range(10**9),
    ],
    ids=["text", "list", "mapping", "key", "integer", "bytes", "range"],
)
def test_it_is_never_much_longer_than_the_bound(value):
    found = bounded(
        {"a": value, "b": value, "c": "kept" if isinstance(value, int | range) else value}
    )
    assert len(json.dumps(found)) < 2 * MAX_IN_ALL
    assert "a" in found


def test_small_remarks_are_as_they_were_and_long_texts_keep_both_ends():
    plain = {"failed": [{"case": "f(1)", "why": "", "ok": True}], "n": 3, "x": 0.5, "none": None}
    assert bounded(plain) == plain
    text = bounded({"t": "a" * MAX_TEXT + "b" * MAX_TEXT})["t"]
    assert text.startswith("a" * 2000) and text.endswith("b" * 2000) and "4,000 characters" in text


def test_a_structure_without_end_ends():
    nested: list = []
    nested.append(nested)
    assert json.dumps(bounded({"n": nested}))


def test_the_accuracy_is_read_whatever_else_there_is():
    score = read_score({"score": 0.5, **{f"k{i}": "x" * 5000 for i in range(200)}, "acc": True})
    assert score.value == 0.5 and score.extra["acc"] == 1.0 and math.isfinite(score.value)
