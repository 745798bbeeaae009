"""Balancing over ranks: nothing lost, and as even as the better of two heuristics."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.bin_packing import divide_step, partition
from distflow.scheduling.data_plan import minibatches


def heaviest(parts, lengths):
    return max(sum(lengths[i] for i in part) for part in parts)


def best_possible(lengths, num_parts):
    return min(
        max(
            sum(n for n, w in zip(lengths, where, strict=True) if w == part)
            for part in range(num_parts)
        )
        for where in itertools.product(range(num_parts), repeat=len(lengths))
    )


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 6))
def test_every_item_is_in_one_part(lengths, num_parts):
    parts = partition(lengths, num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert parts == partition(lengths, num_parts)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_near_the_best_possible(lengths, num_parts):
    """The greedy is within 4/3 − 1/3k of the best (Graham 1969)."""
    best = best_possible(lengths, num_parts)
    assert (
        heaviest(partition(lengths, num_parts), lengths)
        <= best * (4 / 3 - 1 / (3 * num_parts)) + 1e-9
    )


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=24), st.integers(1, 9), st.integers(1, 4))
def test_each_mini_batch_of_a_step_is_as_even_as_if_it_were_alone(lengths, size, num_parts):
    order = random.Random(0).sample(range(len(lengths)), len(lengths))
    mini_batches = [order[start : start + size] for start in range(0, len(order), size)]
    parts = divide_step(lengths, [mini_batches], num_parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))

    for mini_batch in mini_batches:
        alone = [lengths[i] for i in mini_batch]
        own = [[i for i in part if i in mini_batch] for part in parts]
        assert heaviest(own, lengths) == heaviest(partition(alone, num_parts), alone)


def test_what_is_heavy_in_one_mini_batch_goes_to_who_was_light_before():
    assert divide_step([9, 1, 8, 2], [[[0, 1], [2, 3]]], 2) == [[0, 3], [1, 2]]


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=24),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(2, 3),
)
def test_of_several_passes_too_every_item_is_in_one_part(lengths, size, num_parts, epochs):
    passes = [minibatches(len(lengths), None, size, 0, 0, epoch) for epoch in range(epochs)]
    parts = divide_step(lengths, passes, num_parts)
    assert len(parts) == num_parts and all(part == sorted(part) for part in parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert parts == divide_step(lengths, passes, num_parts)


def test_mini_batches_of_all_passes_are_even():
    """Of long-tailed lengths: a mini-batch takes the time of its heaviest part, here over that of
    even ones."""

    def time_taken(lengths, passes, parts):
        whole = [
            [lengths[i] for i in mini_batch]
            for mini_batches in passes
            for mini_batch in mini_batches
        ]
        slowest = [
            heaviest([[i for i in part if i in mini_batch] for part in parts], lengths)
            for mini_batches in passes
            for mini_batch in mini_batches
        ]

        return sum(slowest) * len(parts) / sum(map(sum, whole))

    for seed in range(5):
        draw = random.Random(seed)
        lengths = [int(min(4000, draw.lognormvariate(6, 0.8))) for _ in range(256)]
        passes = [minibatches(256, None, 64, seed, 0, epoch) for epoch in range(3)]
        assert time_taken(lengths, passes, divide_step(lengths, passes, 8)) < 1.05
        assert time_taken(lengths, passes, divide_step(lengths, passes[:1], 8)) > 1.2, (
            "so that the others matter"
        )


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="num_parts"):
        partition([1], 0)
