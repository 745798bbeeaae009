"""Weights against the mismatch of rollout and trainer, by loops; their statistics by hand."""

import math
from typing import Any

import pytest
import torch

from distflow.algorithms.rollout_correction import (
    Correction,
    compute_rollout_weights,
    effective_sample_size,
    mismatch_statistics,
)


def raw_weights(batch: Any, level: str) -> list[list[float]]:
    """π_trainer / π_rollout by plain loops, 0 outside the mask."""
    out = []
    for i, keep in enumerate(batch.mask.tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        d = {t: float(batch["old_log_probs"][i, t] - batch["log_probs"][i, t]) for t in tokens}
        total = sum(d.values())
        row = [0.0] * len(keep)
        for t in tokens:
            exponent = {"token": d[t], "sequence": total, "geometric": total / len(tokens)}[level]
            row[t] = math.exp(max(-20.0, min(20.0, exponent)))
        out.append(row)
    return out


@pytest.mark.parametrize("spread", [0.3, 12.0])
@pytest.mark.parametrize(
    "threshold", [1.5, (0.0, 1.5), (0.5, 1.5)], ids=["truncate", "mask", "icepop"]
)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("seed", range(3))
def test_weights(case: Any, seed: int, level: Any, threshold: Any, spread: float) -> None:
    batch = case(seed, spread=spread)
    weights, stats = compute_rollout_weights(
        batch["old_log_probs"], batch["log_probs"], batch.mask, Correction(level, threshold)
    )
    raw = raw_weights(batch, level)

    def corrected(w: float) -> float:
        if isinstance(threshold, float):
            return min(w, threshold)
        return w if threshold[0] <= w <= threshold[1] else 0.0

    wanted = [[corrected(w) for w in row] for row in raw]
    torch.testing.assert_close(
        weights.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-9
    )
    assert weights.dtype == torch.float32
    inside = [
        (w, c)
        for r, c_r, k in zip(raw, wanted, batch.mask.tolist(), strict=True)
        for w, c, m in zip(r, c_r, k, strict=True)
        if m
    ]
    assert stats["rollout_is_mean"] == pytest.approx(sum(w for w, _ in inside) / len(inside))
    assert stats["rollout_is_max"] == pytest.approx(max(w for w, _ in inside))
    assert stats["rollout_is_corrected_frac"] == pytest.approx(
        sum(w != c for w, c in inside) / len(inside)
    )
    draws = [c for _, c in inside]
    if level != "token":
        draws = [
            next(c for c, m in zip(row, k, strict=True) if m)
            for row, k in zip(wanted, batch.mask.tolist(), strict=True)
            if any(k)
        ]
    squares = sum(c * c for c in draws)
    assert stats["rollout_is_eff_sample_size"] == pytest.approx(
        sum(draws) ** 2 / (len(draws) * squares) if squares else 0.0
    )


@pytest.mark.parametrize("threshold", [1.5, (0.7, 1.5)])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("seed", range(3))
def test_normalised_weights_have_the_mean_one(
    case: Any, seed: int, level: Any, threshold: Any
) -> None:
    """Over tokens, or over sequences where one weight is a sequence's; after the cap."""
    batch = case(seed, spread=0.4)
    columns = (batch["old_log_probs"], batch["log_probs"], batch.mask)
    weights, _ = compute_rollout_weights(*columns, Correction(level, threshold))
    normalised, stats = compute_rollout_weights(
        *columns, Correction(level, threshold), batch_normalize=True
    )
    rows = [
        [w for w, m in zip(row, keep, strict=True) if m]
        for row, keep in zip(weights.tolist(), batch.mask.tolist(), strict=True)
    ]
    draws = [w for row in rows for w in (row if level == "token" else row[:1])]
    mean = sum(draws) / len(draws)
    assert stats["rollout_is_batch_norm_factor"] == pytest.approx(mean, rel=1e-6)
    torch.testing.assert_close(normalised, (weights / mean).float(), rtol=1e-6, atol=1e-9)


def test_weights_that_are_all_zero_stay() -> None:
    weights, stats = compute_rollout_weights(
        torch.zeros(1, 2),
        torch.full((1, 2), -5.0),
        torch.ones(1, 2),
        Correction("token", (0.0, 2.0)),
        batch_normalize=True,
    )
    assert weights.tolist() == [[0.0, 0.0]] and stats["rollout_is_batch_norm_factor"] == 1.0


def test_effective_sample_size_by_hand() -> None:
    ones = torch.ones(1, 4)
    assert float(effective_sample_size(ones, ones)) == 1.0
    assert float(effective_sample_size(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), ones)) == 0.25
    assert float(
        effective_sample_size(torch.tensor([[3.0, 1.0]]), torch.ones(1, 2))
    ) == pytest.approx(16 / 20)
    assert float(effective_sample_size(torch.zeros(1, 4), ones)) == 0.0
    assert float(effective_sample_size(ones, torch.zeros(1, 4))) == 0.0


def test_equal_policies_weigh_one_and_carry_no_gradient() -> None:
    log_probs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    for level in ("token", "sequence", "geometric"):
        weights, stats = compute_rollout_weights(log_probs, log_probs, mask, Correction(level))
        assert torch.equal(weights, mask)
        assert not weights.requires_grad
        assert (stats["rollout_is_eff_sample_size"], stats["rollout_is_corrected_frac"]) == (
            1.0,
            0.0,
        )


def test_nothing_left_is_reported_not_raised() -> None:
    weights, stats = compute_rollout_weights(
        torch.zeros(2, 3),
        torch.full((2, 3), -5.0),
        torch.ones(2, 3),
        Correction("token", (0.0, 2.0)),
    )
    assert weights.sum() == 0
    assert (stats["rollout_is_eff_sample_size"], stats["rollout_is_corrected_frac"]) == (0.0, 1.0)
    _, empty = compute_rollout_weights(*[torch.zeros(0, 0)] * 3, Correction("sequence"))
    assert set(empty.values()) == {0.0}


def test_mismatch_statistics_by_hand() -> None:
    trainer = torch.tensor([[-1.0, -2.0, math.nan]])
    rollout = torch.tensor([[-1.5, -1.8, math.inf]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    stats = mismatch_statistics(trainer, rollout, mask)
    assert stats["mean_abs"] == pytest.approx(0.35)
    assert stats["max_abs"] == pytest.approx(0.5)
    w = [math.exp(0.5), math.exp(-0.2)]
    assert stats["k3"] == pytest.approx(((w[0] - 1.5) + (w[1] - 0.8)) / 2, rel=1e-6)
    assert stats["ess"] == pytest.approx(sum(w) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2)), rel=1e-6)
