"""DPPO: a token is bounded by the change of its probability, not by its ratio."""

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, check_dual_clip
from distflow.algorithms.losses.divergence_bound import (
    DivergenceBound,
    masked_gradient,
    probabilities,
)
from distflow.algorithms.masked_reductions import under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "arXiv:2602.04879"
SETTINGS = """
defaults: [grpo, _self_]
actor_rollout_ref:
  actor:
    policy_loss: dppo_tv
    clip_ratio_c: 20.0  # section 5.4 recommends a large value; 20 is verl's
    use_kl_loss: false
trainer: {experiment_name: dppo_tv_training}
"""


@register_policy_loss("dppo_tv", check=check_dual_clip)
def compute_dppo_tv_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: DivergenceBound = 0.2,
    clip_ratio_high: DivergenceBound = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """−sg[min(r, c)]·A·logπ per token, 0 where π − π_old is above `clip_ratio_high` (A > 0) or
    below −`clip_ratio_low`.

    All `(bs, response_length)`. `clip_ratio_c` None leaves the weight untruncated; the paper
    recommends a large value (section 5.4).
    """
    policy, old = probabilities(log_probs, old_log_probs, loss_mask)
    moved = policy - old
    inside = torch.where(
        under_mask(advantages, loss_mask) > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low
    )
    return masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)
