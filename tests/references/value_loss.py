"""The critic's loss, and that of a reward model."""

import math

import torch
from torch import Tensor


def half_square(error: Tensor) -> Tensor:
    return error**2 / 2.0


def huber(error: Tensor, delta: float) -> Tensor:
    """Half the square up to δ, then the line that continues it (Huber 1964)."""
    return torch.where(error.abs() <= delta, error**2 / 2.0, delta * error.abs() - delta**2 / 2.0)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    cliprange_value: float | None = 0.5,
    critic_loss: str = "mse",
    huber_delta: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(ℓ(v − R), ℓ(clip(v, v_old ± ε) − R)) (arXiv:1707.06347, as in the original code)."""

    def distance(error: Tensor) -> Tensor:
        return half_square(error) if critic_loss == "mse" else huber(error, huber_delta)

    plain = distance(value - target)
    stats = {"vpred_mean": value.detach()}
    if cliprange_value is None:
        return plain, stats

    near = old_value + (value - old_value).clamp(-cliprange_value, cliprange_value)
    kept_near = distance(near - target)
    return torch.maximum(plain, kept_near), {**stats, "vf_clipfrac": kept_near > plain}


def pair_loss(chosen: float, rejected: float) -> float:
    """−log σ(chosen − rejected) (Bradley and Terry 1952; arXiv:2203.02155, equation 1)."""
    gap = rejected - chosen
    return max(gap, 0.0) + math.log1p(math.exp(-abs(gap)))
