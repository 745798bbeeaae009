"""Dynamic sampling and the penalty on over-long answers."""

import pytest
import torch

from distflow.algorithms.normalization_filters_and_weights import drop_reason
from distflow.rewards.router import Overlong


@pytest.mark.parametrize(
    ("metric", "valid", "reason"),
    [
        ([1.0, 0.0, 1.0], None, None),
        ([1.0, 1.0, 1.0], None, "all_equal"),
        ([0.1, 0.1], None, "all_equal"),
        ([1.0, 1.0, 0.0], [True, True, False], "all_equal"),
        ([1.0, 0.0, float("nan")], [True, True, False], None),
        ([1.0, 0.0], [True, False], "too_few_scores"),
        ([1.0, 0.0], [False, False], "too_few_scores"),
        ([1.0], None, "too_few_scores"),
    ],
)
def test_groups_without_a_signal(
    metric: list[float], valid: list[bool] | None, reason: str | None
) -> None:
    mask = None if valid is None else torch.tensor(valid)
    assert drop_reason(torch.tensor(metric), mask) == reason


def test_the_penalty_by_hand() -> None:
    # Limit 100, buffer 20: nothing up to 80, half of it at 90, all at 100.
    lengths = (0, 80, 85, 90, 100, 150)
    assert [Overlong(20, 2.0).penalty(length, 100) for length in lengths] == [
        0.0,
        0.0,
        -0.5,
        -1.0,
        -2.0,
        -2.0,
    ]
    assert [Overlong().penalty(length, 100) for length in lengths] == [0.0] * 6
    with pytest.raises(ValueError, match="0..100"):
        Overlong(101).penalty(85, 100)
