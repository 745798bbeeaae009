"""From losses of tokens to the loss of a mini-batch, in any micro-batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algorithms import agg_loss, masked_mean, masked_whiten
from distflow.algorithms.masked_reductions import (
    check_scale,
    loss_counts,
    masked_var,
    token_weights,
    weighted_sum,
)
from distflow.builtin_names import LOSS_AGG_MODES
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import Ranks, run_on_ranks
from tests.references import numbers
from tests.references.aggregation import aggregate


def rows_of(batch: Drawn, name: str) -> list[Any]:
    return [batch.of_tokens(row, name) for row in range(len(batch))]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=40)
@given(batch=batches(), every_row=st.booleans(), data=st.data())
def test_shares_of_micro_batches_add_up(
    mode: str, batch: Drawn, every_row: bool, data: Any
) -> None:
    wanted = float(aggregate(rows_of(batch, "rewards"), mode, 5.0, every_row))
    counts = loss_counts(batch.mask)
    micros = parts_of(batch, data.draw(st.lists(st.booleans(), min_size=1, max_size=4)))

    found = 0.0
    for rows in micros:
        mask = batch.mask[rows]
        weights = token_weights(mask, mode, counts, 5.0, every_row=every_row)
        found += float(weighted_sum(batch["rewards"][rows], weights))

    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=20)
@given(batch=batches(), scale=st.sampled_from((None, 2.5)))
def test_a_user_of_agg_loss_gets_the_same(mode: str, batch: Drawn, scale: float | None) -> None:
    losses = batch["rewards"].clone().requires_grad_()
    found = agg_loss(losses, batch.mask, mode, scale)
    found.backward()
    wanted = float(aggregate(rows_of(batch, "rewards"), mode, scale or batch.mask.shape[1]))
    assert float(found.detach()) == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    assert losses.grad is not None and not losses.grad[batch.mask == 0].any()


def test_modes_and_scales_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="'mean'.*token-mean"):
        check_scale("mean", None)
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        check_scale("seq-mean-token-sum-norm", None)
    with pytest.raises(ValueError, match="not 0"):
        check_scale("token-mean", 0.0)


@settings(max_examples=40)
@given(batch=batches(), first=st.lists(st.booleans(), min_size=1, max_size=4))
def test_moments_and_whitening_over_two_ranks(batch: Drawn, first: list[bool]) -> None:
    values = [value for row in rows_of(batch, "rewards") for value in row.tolist()]
    white = torch.zeros_like(batch.mask)
    white[batch.mask > 0] = torch.tensor(numbers.whitened(values), dtype=torch.float64)
    mean = numbers.mean(values) if values else 0.0
    variance = numbers.std(values) ** 2 if len(values) > 1 else 0.0
    shares = parts_of(batch, first)

    def of_rank(rows: list[int]) -> Any:
        def call(ranks: Ranks) -> Any:
            arguments = (batch["rewards"][rows].float(), batch.mask[rows], ranks)
            return masked_mean(*arguments), masked_var(*arguments), masked_whiten(*arguments)

        return call

    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        assert float(found[0]) == pytest.approx(mean, rel=1e-12, abs=1e-12)
        assert float(found[1]) == pytest.approx(variance, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(found[2], white[rows], rtol=1e-9, atol=1e-9)
