"""Rejection masks and their statistics, by loops over tokens."""

import math
from typing import Any

import pytest
import torch

from distflow.algorithms.rollout_correction import compute_rejection_mask
from distflow.builtin_names import ROLLOUT_RS

Bounds = tuple[float | None, float]


def passes(name: str, d: list[float], bounds: Bounds) -> list[bool]:
    """Which tokens of a sequence pass; d: log π_trainer − log π_rollout of each."""
    level, _, kind = name.rpartition("_")
    d = [max(-20.0, min(20.0, x)) for x in d]
    values = [{"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind] for x in d]
    if level != "token":
        total = {
            "seq_sum": sum(values),
            "seq_mean": sum(values) / len(values),
            "seq_max": max(values),
        }[level]
        values = [total] * len(values)
    lower, upper = bounds
    if kind == "k1":
        return [math.log(lower or 1 / upper) <= x <= math.log(upper) for x in values]
    return [x <= upper for x in values]


@pytest.mark.parametrize("spread", [0.2, 2.0, 15.0])
@pytest.mark.parametrize("name", ROLLOUT_RS)
def test_each_statistic(case: Any, name: str, spread: float) -> None:
    for seed in range(3):
        batch = case(seed, spread=spread)
        bounds: Bounds = (None, 1.4) if name.endswith("k1") else (None, 0.02)
        mask, stats = compute_rejection_mask(
            batch["old_log_probs"],
            batch["log_probs"],
            batch.mask,
            rollout_rs=[name],
            bounds=[bounds],
        )
        old = batch.rows("old_log_probs")
        rollout = batch.rows("log_probs")
        num_tokens = num_masked = rows_masked = 0
        for i, keep in enumerate(batch.mask.tolist()):
            tokens = [t for t, m in enumerate(keep) if m]
            wanted = (
                passes(name, [old[i][t] - rollout[i][t] for t in tokens], bounds) if tokens else []
            )
            assert [mask[i, t] == 1.0 for t in tokens] == wanted
            assert float(mask[i].sum()) == sum(wanted)
            num_tokens = num_tokens + len(tokens)
            num_masked = num_masked + wanted.count(False)
            rows_masked += False in wanted
        assert stats[f"{name}_masked"] == stats["masked"] == pytest.approx(num_masked / num_tokens)
        assert stats["seq_masked"] == pytest.approx(
            rows_masked / sum(any(keep) for keep in batch.mask.tolist())
        )


def test_a_token_must_pass_all_and_bounds_are_inclusive() -> None:
    d = torch.tensor([[0.0, math.log(2.0), -math.log(2.0), 0.1]], dtype=torch.float64)
    mask, stats = compute_rejection_mask(
        d,
        torch.zeros_like(d),
        torch.ones(1, 4),
        rollout_rs=["token_k1", "token_k2"],
        bounds=[(0.5, 1.5), (None, 0.1)],
    )
    # π_rollout / π_trainer is 1, 1/2, 2, 0.9; d²/2 is 0, 0.24, 0.24, 0.005
    assert mask.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    assert (stats["token_k1_masked"], stats["token_k2_masked"], stats["masked"]) == (0.25, 0.5, 0.5)
    one_sided, _ = compute_rejection_mask(
        d, torch.zeros_like(d), torch.ones(1, 4), rollout_rs=["token_k1"], bounds=[(0.5, 1.5)]
    )
    assert one_sided.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    inclusive, _ = compute_rejection_mask(
        d, torch.zeros_like(d), torch.ones(1, 4), rollout_rs=["token_k1"], bounds=[(0.5, 2.0)]
    )
    assert inclusive.tolist() == [[1.0, 1.0, 1.0, 1.0]]


def test_what_was_out_of_the_loss_stays_out_and_nothing_of_it_is_read() -> None:
    nan = math.nan
    mask, stats = compute_rejection_mask(
        torch.tensor([[nan, 0.0], [nan, math.inf]]),
        torch.tensor([[math.inf, 0.0], [nan, nan]]),
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        rollout_rs=ROLLOUT_RS,
        bounds=[(None, 1.5)] * len(ROLLOUT_RS),
    )
    assert mask.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert set(stats.values()) == {0.0}


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 3)])
def test_an_empty_batch(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    bounds: list[Bounds] = [(None, 1.5)] * len(ROLLOUT_RS)
    mask, stats = compute_rejection_mask(empty, empty, empty, rollout_rs=ROLLOUT_RS, bounds=bounds)
    assert mask.shape == shape and set(stats.values()) == {0.0}
