"""GMPO: the geometric mean of a sequence's clipped ratios."""

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import as_stat, raw_log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "Zhao et al. 2025, arXiv:2507.20673"
SETTINGS = """
defaults: [grpo, _self_]
actor_rollout_ref:
  actor:
    policy_loss: gmpo
    clip_ratio_low: 0.4  # ratios are clipped to (e^-0.4, e^0.4)
    clip_ratio_high: 0.4
    loss_agg_mode: seq-mean-token-mean
trainer: {experiment_name: gmpo_training}
"""


@register_policy_loss("gmpo", every_row=True)
def compute_gmpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """−A · (Π r_t)^(1/n), the sequence's loss, on each of its n tokens; all
    `(bs, response_length)`.

    Log-ratios are clipped per token only at −ε_low if A < 0 and at ε_high if A > 0, so a ratio may
    overflow if A < 0; A is the sequence's mean advantage. The paper's mean over sequences is
    `seq-mean-token-mean`, and counts every row, even without tokens, as verl, siiRL and TRL do.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask).to(difference.dtype)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    pessimistic = torch.where(
        advantages > 0, difference.clamp(max=clip_ratio_high), difference.clamp(min=-clip_ratio_low)
    )
    pessimistic = torch.where(advantages == 0, torch.zeros_like(pessimistic), pessimistic)
    ratio = (pessimistic.sum(dim=-1, keepdim=True) / lengths).exp()
    loss = -(advantages.sum(dim=-1, keepdim=True) / lengths) * ratio
    stats = {
        "pg_clipfrac": as_stat((advantages > 0) & (difference > clip_ratio_high), difference),
        "pg_clipfrac_lower": as_stat((advantages < 0) & (difference < -clip_ratio_low), difference),
        "ppo_kl": -difference.detach(),
    }

    return loss.expand_as(difference), stats
