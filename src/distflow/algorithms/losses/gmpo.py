"""Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673)."""

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, as_stat, clip_range, raw_log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


@register_policy_loss("gmpo", every_row=True)
def compute_gmpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Stats]:
    """−A · (Π r_t)^(1/n), the sequence's loss on each of its n tokens; all `(bs, response_length)`.

    Log-ratios are clipped per token to −ε_low (where A < 0) and ε_high (where A > 0), and nowhere else, so a ratio may
    overflow where A < 0; A is the sequence's mean advantage. The paper's mean over sequences is `seq-mean-token-mean`,
    and counts every row, also one without a token, as verl, siiRL and TRL do.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask).to(difference.dtype)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    pessimistic = torch.where(advantages > 0, difference.clamp(max=high), difference.clamp(min=-low))
    pessimistic = torch.where(advantages == 0, torch.zeros_like(pessimistic), pessimistic)
    ratio = (pessimistic.sum(dim=-1, keepdim=True) / lengths).exp()
    loss = -(advantages.sum(dim=-1, keepdim=True) / lengths) * ratio
    stats = {
        "pg_clipfrac": as_stat((advantages > 0) & (difference > high), difference),
        "pg_clipfrac_lower": as_stat((advantages < 0) & (difference < -low), difference),
        "ppo_kl": -difference.detach(),
    }
    return loss.expand_as(difference), stats
