"""Groups without a signal, over-long responses, and weights of samples, against the references."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algorithms.group_filter import drop_reason
from distflow.algorithms.sample_weights import (
    difficulty_weights,
    is_within,
    length_weights,
    share_right,
    with_mean_one,
)
from distflow.rewards.router import Overlong
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import Ranks, run_on_ranks
from tests.references import rewards, sample_weights
from tests.references.sample_weights import Response

SCORES = st.sampled_from((0.0, 0.5, 1.0, 0.1, 2.0**53, 2.0**53 - 1, float("nan")))


@settings(max_examples=100)
@given(
    drawn=st.lists(st.tuples(SCORES, st.booleans()), max_size=5),
    mean_range=st.sampled_from((None, (0.25, 0.75), (0.5, 1.0), (0.0, 0.5))),
)
def test_a_group_without_a_signal(drawn: list[tuple[float, bool]], mean_range: Any) -> None:
    valid = [is_valid and score == score for score, is_valid in drawn]
    scores = torch.tensor([score for score, _ in drawn], dtype=torch.float64)
    known = [score for (score, _), counts in zip(drawn, valid, strict=True) if counts]
    found = drop_reason(scores, torch.tensor(valid, dtype=torch.bool), mean_range)
    assert found == rewards.drop_reason(known, mean_range)
    if all(valid):
        assert drop_reason(scores, None, mean_range) == found


@given(
    length=st.integers(0, 150),
    buffer_tokens=st.integers(0, 100),
    factor=st.sampled_from((1.0, 2.0)),
)
def test_the_penalty_on_over_long_responses(length: int, buffer_tokens: int, factor: float) -> None:
    wanted = rewards.overlong_penalty(length, 100, buffer_tokens, factor)
    assert Overlong(buffer_tokens, factor).penalty(length, 100) == pytest.approx(wanted, abs=1e-12)


BANDS = st.sampled_from((None, (0.5, 2.0), (1.5, 0.5), (0.0, 1.0)))


@settings(max_examples=80)
@given(
    batch=batches(),
    difficulty=BANDS,
    length=BANDS,
    first=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_weights_over_two_ranks(
    batch: Drawn, difficulty: Any, length: Any, first: list[bool]
) -> None:
    lengths = (batch.mask > 0).sum(dim=-1)
    responses = [
        Response(int(batch.group[row]), float(batch.acc[row]), int(lengths[row]))
        for row in batch.rows()
    ]
    wanted = torch.zeros(len(batch), dtype=torch.float64)
    shares_right = torch.zeros(len(batch), dtype=torch.float64)

    numbers = sample_weights.weigh(responses, difficulty, length)
    for row, own, weight in zip(batch.rows(), responses, numbers, strict=True):
        wanted[row] = weight
        shares_right[row] = sample_weights.share_right(own, responses)

    shares = parts_of(batch, first)

    def of_rank(rows: list[int]) -> Any:
        def call(ranks: Ranks) -> Any:
            valid = batch.valid[rows]
            share = share_right(batch.acc[rows].float(), batch.group[rows], valid)
            weights = torch.ones(len(rows), dtype=torch.float64)
            if difficulty is not None:
                weights = weights * difficulty_weights(share, difficulty)
            if length is not None:
                weights = weights * length_weights(lengths[rows], valid, length, ranks)
            return share, with_mean_one(weights, valid, ranks)

        return call

    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        valid = batch.valid[rows]
        torch.testing.assert_close(found[0][valid], shares_right[rows][valid])
        torch.testing.assert_close(found[1], wanted[rows], rtol=1e-9, atol=1e-12)


def test_a_group_without_a_score_has_no_share_and_bounds_are_out() -> None:
    share = share_right(torch.ones(2), torch.zeros(2), torch.zeros(2))
    assert share.tolist() == [0.0, 0.0]
    found = is_within(torch.tensor([0.0, 0.1, 0.5, 0.95, 1.0]), (0.1, 0.95))
    assert found.tolist() == [False, False, True, False, False]
