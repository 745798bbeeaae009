"""Means, variances and whitening under a mask, and the critic's loss, against loops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distflow.algorithms import masked_mean, masked_whiten
from distflow.algorithms.masked_reductions import masked_var
from distflow.algorithms.objectives import compute_value_loss


def inside(case: Any, name: str) -> list[float]:
    return case[name][case.mask > 0].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_moments(case: Any, seed: int) -> None:
    batch = case(seed)
    values = inside(batch, "rewards")
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    assert float(masked_mean(batch["rewards"], batch.mask)) == pytest.approx(mean, rel=1e-12)
    assert float(masked_var(batch["rewards"], batch.mask)) == pytest.approx(variance, rel=1e-12)
    white = masked_whiten(batch["rewards"], batch.mask)
    wanted = [(v - mean) / math.sqrt(variance + 1e-8) for v in values]
    assert white[batch.mask > 0].tolist() == pytest.approx(wanted, rel=1e-12)
    assert (white[batch.mask == 0] == 0).all()


def test_the_variance_keeps_its_digits_far_from_zero() -> None:
    values = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2]], dtype=torch.float64)
    assert float(masked_var(values, torch.ones(1, 3))) == 1.0


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_with_fewer_than_two_tokens_values_are_only_centred(num_tokens: int) -> None:
    values = torch.full((2, 2), 7.0)
    mask = torch.zeros(2, 2)
    mask.view(-1)[:num_tokens] = 1.0
    assert masked_whiten(values, mask).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert float(masked_var(values, mask)) == 0.0


def half_square(x: float) -> tuple[float, float]:
    """(loss, slope)."""
    return x * x / 2, x


def huber(delta: float) -> Callable[[float], tuple[float, float]]:
    def of(x: float) -> tuple[float, float]:
        far = abs(x) > delta
        return (delta * (abs(x) - delta / 2), math.copysign(delta, x)) if far else half_square(x)

    return of


@pytest.mark.parametrize("delta", [None, 0.3, 1.5, 10.0])
@pytest.mark.parametrize("clip", [0.5, 0.1, None])
@pytest.mark.parametrize("seed", range(4))
def test_the_value_loss_and_its_gradient(
    case: Any, seed: int, clip: float | None, delta: float | None
) -> None:
    batch = case(seed)
    of = half_square if delta is None else huber(delta)
    options: dict[str, Any] = {} if delta is None else {"value_loss": "huber", "huber_delta": delta}
    v = batch["log_probs"].clone().requires_grad_()
    loss, stats = compute_value_loss(
        v, batch["values"], batch["rewards"], batch.mask, cliprange_value=clip, **options
    )
    loss.sum().backward()
    for i, keep in enumerate(batch.mask.tolist()):
        for t, m in enumerate(keep):
            if not m:
                assert v.grad[i, t] == 0.0
                continue
            new, old, target = (
                float(x[i, t]) for x in (v.detach(), batch["values"], batch["rewards"])
            )
            near = new if clip is None else min(max(new, old - clip), old + clip)
            (plain, slope), (clipped, _) = of(new - target), of(near - target)
            cut = clipped > plain
            assert float(loss.detach()[i, t]) == pytest.approx(max(plain, clipped), rel=1e-12)
            assert float(v.grad[i, t]) == pytest.approx(0.0 if cut else slope, rel=1e-9, abs=1e-12)
            if clip is not None:
                assert float(stats["vf_clipfrac"][i, t]) == float(cut)
