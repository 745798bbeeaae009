"""Mini-batches: whole prompt groups, each sample once, decided by seed, step and epoch alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.data_plan import minibatches


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 100))
def test_each_prompt_is_whole_in_one_mini_batch(group_sizes, prompts, step):
    groups = [7 * number for number, size in enumerate(group_sizes) for _ in range(size)]
    batches = minibatches(len(groups), groups, prompts, seed=1, step=step, epoch=0)
    assert sorted(itertools.chain(*batches)) == list(range(len(groups)))
    assert all(batch == sorted(batch) for batch in batches)
    found = [{groups[sample] for sample in batch} for batch in batches]
    assert sum(map(len, found)) == len(group_sizes)
    assert [len(batch) for batch in found[:-1]] == [prompts] * (len(found) - 1)
    assert 1 <= len(found[-1]) <= prompts


def test_another_step_or_epoch_draws_another_split():
    splits = {
        str(minibatches(32, None, 8, seed, step, epoch))
        for seed in (0, 1)
        for step in (0, 1)
        for epoch in (0, 1)
    }
    assert len(splits) == 8
    assert minibatches(32, None, 8, 1, 2, 3) == minibatches(32, None, 8, 1, 2, 3)


def test_the_split_is_pinned():
    assert minibatches(8, None, 3, seed=1, step=2, epoch=0) == [[1, 5, 6], [3, 4, 7], [0, 2]]


def test_group_ids_of_arrays_are_compared_by_value():
    groups = np.array([4, 4, 9, 9])
    assert sorted(minibatches(4, groups, 1, 0, 0, 0)) == [[0, 1], [2, 3]]


def test_one_mini_batch_is_the_step_in_ticket_order():
    assert minibatches(6, [0, 0, 1, 1, 2, 2], 8, 0, 5, 0) == [[0, 1, 2, 3, 4, 5]]
    assert minibatches(0, [], 8, 0, 5, 0) == []


def test_a_mini_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="mini_batch_prompts"):
        minibatches(4, None, 0, 0, 0, 0)
