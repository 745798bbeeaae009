"""Masks and weights of samples, worked out by hand."""

import pytest
import torch

from distflow.algorithms.normalization_filters_and_weights import (
    difficulty_weights,
    is_within,
    length_weights,
    share_right,
    with_mean_one,
)

GROUPS = torch.tensor([0, 0, 0, 1, 1, 2])
VALID = torch.tensor([True, True, False, True, True, False])
ACC = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])


def test_how_many_of_a_group_are_right_counts_valid_samples_only() -> None:
    assert share_right(ACC, GROUPS, VALID).tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 0.0]


def test_what_everybody_or_nobody_can_is_outside_the_band() -> None:
    share = torch.tensor([0.0, 0.1, 0.5, 0.95, 1.0])
    assert is_within(share, (0.1, 0.95)).tolist() == [False, False, True, False, False]
    assert is_within(share, (0.0, 1.0)).tolist() == [False, True, True, True, False]


def test_hard_prompts_weigh_more() -> None:
    assert difficulty_weights(torch.tensor([1.0, 0.5, 0.0]), (0.5, 2.0)).tolist() == [
        0.5,
        1.25,
        2.0,
    ]


def test_short_answers_weigh_more_between_the_shortest_and_the_longest_valid_one() -> None:
    lengths = torch.tensor([10, 30, 99, 20, 10, 1])
    weights = length_weights(lengths, VALID, (1.5, 0.5))
    assert weights[VALID].tolist() == [1.5, 0.5, 1.0, 1.5]
    assert length_weights(torch.tensor([7, 7]), torch.ones(2), (1.5, 0.5)).tolist() == [1.5, 1.5]
    assert length_weights(lengths, torch.zeros(6), (1.5, 0.5)).isfinite().all()


def test_weights_have_the_mean_one_over_valid_samples() -> None:
    found = with_mean_one(torch.tensor([1.0, 2.0, 50.0, 3.0, 2.0, 50.0]), VALID)
    assert found.tolist() == pytest.approx([0.5, 1.0, 0.0, 1.5, 1.0, 0.0])
    assert with_mean_one(torch.tensor([0.0, 0.0]), torch.ones(2)).tolist() == [0.0, 0.0]
