"""PPO's clipped ratio (arXiv:1707.06347) with clip-higher (DAPO, arXiv:2503.14476) and dual clip
(arXiv:1912.09729)."""

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import as_stat

Stats = dict[str, Tensor]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Stats]:
    """PPO's pessimistic loss per token: max(−rA, −clip(r, 1 − low, 1 + high)A), for A < 0 at most
    −cA (dual clip)."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)

    loss = torch.maximum(plain, clipped)
    stats = {"pg_clipfrac": as_stat(clipped > plain, ratio)}
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        stats["pg_clipfrac_lower"] = as_stat(over, ratio)

    return loss, stats


def check_dual_clip(clip_ratio_c: float | None) -> None:
    """Raises ValueError for a dual clip that would clip even a ratio of 1."""
    if clip_ratio_c is not None and not clip_ratio_c > 1.0:
        raise ValueError(
            f"clip_ratio_c must be above 1, or null to disable the dual clip; not {clip_ratio_c}"
        )
