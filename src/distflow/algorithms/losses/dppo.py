"""Divergence PPO: a token is left out where the policy moved too far in probability, not in ratio (arXiv:2602.04879).

The binary approximations of the divergence, as verl's `dppo_tv` and `dppo_kl`. The clip options are bounds of the
divergence here.
"""

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, as_stat, check_dual_clip, clip_range, log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss

EPSILON = 1e-8


@register_policy_loss("dppo_tv", check=check_dual_clip)
def compute_dppo_tv_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """−sg[min(r, c)]·A·logπ per token, 0 where π − π_old is above `clip_ratio_high` (A > 0) or below −`clip_ratio_low`.

    All `(bs, response_length)`. `clip_ratio_c` None leaves the weight untruncated; the paper wants it large (its
    section 5.4). Raises ValueError if it is not above 1.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    policy, old = _probabilities(log_probs, old_log_probs, loss_mask)
    moved = policy - old
    inside = torch.where(under_mask(advantages, loss_mask) > 0, moved <= high, moved >= -low)
    return _masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)


@register_policy_loss("dppo_kl", check=check_dual_clip)
def compute_dppo_kl_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """As `dppo_tv`, 0 where the token moved the way that A pushes it by a binary KL(old ‖ policy) above the bound.

    Binary: of the distributions {this token, any other}. Raises ValueError if `clip_ratio_c` is not above 1.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    policy, old = _probabilities(log_probs, old_log_probs, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    others = torch.log((1.0 - old + EPSILON) / (1.0 - policy + EPSILON))
    divergence = -old * difference + (1.0 - old) * others
    rises = (divergence <= high) | (policy <= old)
    falls = (divergence <= low) | (policy >= old)
    inside = torch.where(under_mask(advantages, loss_mask) > 0, rises, falls)
    return _masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)


def _probabilities(log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(policy, old policy) of each token without gradient, at most 1 whatever rounding says; 1 outside the mask."""
    policy = under_mask(log_probs.detach(), loss_mask).clamp(max=0.0).exp()
    return policy, policy if old_log_probs is None else under_mask(old_log_probs, loss_mask).clamp(max=0.0).exp()


def _masked_gradient(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None,
    inside: Tensor,
    clip_ratio_c: float | None,
) -> tuple[Tensor, Stats]:
    check_dual_clip(clip_ratio_c)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    weight = as_stat(inside, ratio) * (ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c))
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    stats = {"pg_clipfrac": as_stat(~inside, ratio), "ppo_kl": -difference}
    if clip_ratio_c is not None:
        stats["pg_clipfrac_lower"] = as_stat(inside & (ratio > clip_ratio_c), ratio)
    return loss, stats
