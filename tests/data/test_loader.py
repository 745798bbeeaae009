"""Rows by ticket: each row once an epoch, whatever is asked when; another data set is refused on resume."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import tiny_tokenizer

from distflow.config.errors import UserError
from distflow.data.loader import Loader
from distflow.data.prompts import PromptOptions, PromptSet, encode_rows
from distflow.data.rows import BadRows, RawRow
from distflow.graph.fields import find_field

OPTIONS = PromptOptions(max_prompt_length=50, max_response_length=50)


def prompt_set(num_rows: int, first: int = 0, response: str | None = None) -> PromptSet:
    rows = [RawRow(f"f:{i}", f"prompt {first + i}", i, "d", response, {}) for i in range(num_rows)]
    return encode_rows(rows, tiny_tokenizer(), OPTIONS, BadRows())


SETS = {num_rows: prompt_set(num_rows) for num_rows in (1, 2, 7, 10)}


@given(
    num_rows=st.sampled_from(sorted(SETS)), seed=st.integers(0, 2**32), shuffle=st.booleans(), epoch=st.integers(0, 5)
)
def test_every_row_is_named_once_in_each_epoch(num_rows, seed, shuffle, epoch):
    loader = Loader(SETS[num_rows], seed=seed, shuffle=shuffle)
    numbers = range(epoch * num_rows, (epoch + 1) * num_rows)
    assert Counter(loader.row_of(number).index for number in numbers) == Counter(range(num_rows))
    assert {loader.place(number)[0] for number in numbers} == {epoch}


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(0, 99))
def test_a_resumed_loader_names_the_same_rows_in_any_order_of_asking(numbers, seed):
    straight, resumed = (Loader(SETS[10], seed=seed, shuffle=True) for _ in range(2))
    expected = {number: straight.row_of(number) for number in range(201)}
    assert all(resumed.row_of(number) == expected[number] for number in numbers)


def test_without_shuffling_the_order_is_that_of_the_files():
    loader = Loader(SETS[7], seed=3, shuffle=False)
    assert [loader.row_of(number).ground_truth for number in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_shuffling_depends_on_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader(SETS[10], seed=seed, shuffle=True)
        return [loader.row_of(epoch * 10 + i).index for i in range(10)]

    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_its_fields_are_known_to_the_graph():
    sft = Loader(prompt_set(2, response="r"), seed=0, shuffle=False)
    assert (
        "response_ids" in sft.data_fields()
        and "response_ids" not in Loader(SETS[2], seed=0, shuffle=True).data_fields()
    )
    assert all(find_field(name) is not None for name in sft.data_fields())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Loader(prompt_set(7, first=1), seed=1, shuffle=True), "the data or the tokenizer changed"),
        (Loader(SETS[10], seed=1, shuffle=True), "num_rows was 10, now it is 7"),
        (Loader(SETS[7], seed=2, shuffle=True), "data.seed"),
        (Loader(SETS[7], seed=1, shuffle=False), "data.shuffle"),
    ],
)
def test_a_resume_with_other_data_is_refused(other, said):
    saved = json.loads(json.dumps(other.state()))
    with pytest.raises(UserError, match="trainer.resume_mode=never") as raised:
        Loader(SETS[7], seed=1, shuffle=True).check_state(saved)
    assert said in str(raised.value)


def test_a_resume_with_the_same_data_goes_on():
    Loader(prompt_set(7), seed=1, shuffle=True).check_state(
        json.loads(json.dumps(Loader(SETS[7], seed=1, shuffle=True).state()))
    )
