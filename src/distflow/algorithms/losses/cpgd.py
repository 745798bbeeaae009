"""Clipped policy gradient with policy drift: the log-prob itself is clipped (Liu et al. 2025, arXiv:2505.12504).

The drift is the term of siiRL's actor (`policy_drift_coeff`).
"""

import math

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, as_stat, clip_range, log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss

MAX_DRIFT = 2.0


def check_drift(policy_drift_coeff: float) -> None:
    """Raises ValueError for a coefficient below 0."""
    if not policy_drift_coeff >= 0:
        raise ValueError(f"policy_drift_coeff must be 0 (off) or above, e.g. 0.001, not {policy_drift_coeff}")


@register_policy_loss("cpgd", check=check_drift)
def compute_cpgd_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    policy_drift_coeff: float = 0.0,
) -> tuple[Tensor, Stats]:
    """−clamp(logπ)·A + policy_drift_coeff · sg[min(r − 1, 2)]·logπ per token; all `(bs, response_length)`.

    The clamp is from above at logπ_old + ln(1 + ε_high) where A > 0, else from below at logπ_old + ln(1 − ε_low). The
    drift's gradient is that of KL(old ‖ policy), estimated by k3 (r − 1 − ln r) and bounded; the statistic
    `policy_drift` is that estimate. Raises ValueError for a negative coefficient.
    """
    check_drift(policy_drift_coeff)
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    current, advantages = under_mask(log_probs, loss_mask), under_mask(advantages, loss_mask)
    old = current.detach() if old_log_probs is None else under_mask(old_log_probs, loss_mask)
    ceiling = old + math.log1p(high)
    floor = old + (math.log1p(-low) if low < 1.0 else -math.inf)
    positive = advantages > 0
    outside = torch.where(positive, current > ceiling, current < floor)
    clipped = torch.where(outside, torch.where(positive, ceiling, floor), current)
    loss = -clipped * advantages
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    stats = {"pg_clipfrac": as_stat(outside, current), "ppo_kl": -difference}
    if policy_drift_coeff:
        excess = difference.exp() - 1.0
        loss = loss + policy_drift_coeff * excess.clamp(max=MAX_DRIFT) * current
        stats["policy_drift"] = excess - difference
    return loss, stats
