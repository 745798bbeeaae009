"""Rows of reasoning-gym's data sets: the same for the same seed, whole, and what is wrong with a
source is told."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from urllib.parse import parse_qsl

import pytest

from distflow.data.dataset_columns import Columns, RawRow
from distflow.data.sources import load_rows
from distflow.data.task_packages import GYM, make_dataset, read_entry, write_entry
from distflow.errors import UserError


def installed(test: Callable[..., None]) -> Callable[..., None]:
    """`make test-slow` installs it."""
    return pytest.mark.slow(
        pytest.mark.skipif(
            find_spec("reasoning_gym") is None, reason="wants the extra reasoning-gym"
        )(test)
    )


def rows_of(source: str, max_samples: int = -1) -> list[RawRow]:
    rows, bad = load_rows(f"reasoning-gym:{source}", Columns(), max_samples=max_samples)
    assert not bad.reasons
    return rows


@installed
def test_rows_follow_from_name_settings_and_seed() -> None:
    # Words in a set: a data set whose rows would depend on the hashes of this process.
    first = rows_of("ransom_note?size=4&seed=3")
    again = rows_of("ransom_note?size=9&seed=3", max_samples=4)
    assert [row.prompt for row in first] == [row.prompt for row in again] and len(first) == 4
    assert [row.answer for row in first] == [row.answer for row in again]
    assert first[0].domain == "reasoning-gym/ransom_note" and first[0].origin.endswith(
        "size=4&seed=3, row 1"
    )


@installed
def test_settings_reach_the_data_set_and_rows_are_its_own() -> None:
    from reasoning_gym.factory import create_dataset

    rows = rows_of("chain_sum?size=3&seed=5&min_terms=7&max_terms=7")
    wanted = create_dataset("chain_sum", seed=5, size=3, min_terms=7, max_terms=7)
    assert [row.prompt for row in rows] == [entry["question"] for entry in wanted]
    assert [row.answer for row in rows] == [entry["answer"] for entry in wanted]
    made = rows[0].extra_info[GYM]
    assert isinstance(made, dict) and read_entry(str(made["entry"])) == wanted[0]
    assert made["settings"] == {"seed": 5, "size": 3, "min_terms": 7, "max_terms": 7}


@installed
@pytest.mark.parametrize(
    "source, said",
    [
        ("chain_sums", "no data set 'chain_sums'; did you mean 'chain_sum'?"),
        (
            "chain_sum?min_term=3",
            "'chain_sum' has no setting 'min_term'; did you mean 'min_terms'?",
        ),
        ("chain_sum?min_terms=0", "rejects its settings"),
    ],
)
def test_an_invalid_source_is_reported(source: str, said: str) -> None:
    name, _, setting = source.partition("?")
    with pytest.raises(UserError) as caught:
        make_dataset(name, {key: int(value) for key, value in parse_qsl(setting)})
    assert said in str(caught.value)


@installed
def test_an_unknown_data_set_is_reported_with_the_key() -> None:
    with pytest.raises(
        UserError,
        match="data.train_files: 'reasoning-gym:chain_sums': ",
    ):
        rows_of("chain_sums")


@installed
def test_a_size_is_a_number_of_rows() -> None:
    for size in ("0", "many", "true"):
        with pytest.raises(UserError, match=rf"data\.train_files: .*size={size}'"):
            rows_of(f"chain_sum?size={size}")


@pytest.mark.skipif(
    find_spec("reasoning_gym") is not None, reason="wants to be without the extra reasoning-gym"
)
def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install 'distflow\[reasoning-gym\]'"):
        rows_of("chain_sum")


def test_an_entry_keeps_its_types() -> None:
    entry = {"question": "?", "metadata": {"board": ((1, 2), (3, 4)), 5: {"x"}, "none": None}}
    assert (
        read_entry(write_entry(entry))
        == entry
        != json.loads(json.dumps({"metadata": entry["metadata"]["board"]}))
    )  # type: ignore[index]
    assert read_entry('{"a": true, "b": null}') == {"a": True, "b": None}
    with pytest.raises(ValueError):
        read_entry("[1]")
