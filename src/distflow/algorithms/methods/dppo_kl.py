"""DPPO: a token is bounded by the KL of its old and new probability, not by its ratio."""

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, check_dual_clip
from distflow.algorithms.losses.divergence_bound import (
    DivergenceBound,
    masked_gradient,
    probabilities,
)
from distflow.algorithms.masked_reductions import log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "arXiv:2602.04879"
SETTINGS = """
defaults: [grpo, _self_]
actor_rollout_ref:
  actor:
    policy_loss: dppo_kl
    clip_ratio_c: 20.0  # section 5.4 recommends a large value; 20 is verl's
    use_kl_loss: false
trainer: {experiment_name: dppo_kl_training}
"""


EPSILON = 1e-8


@register_policy_loss("dppo_kl", check=check_dual_clip)
def compute_dppo_kl_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: DivergenceBound = 0.2,
    clip_ratio_high: DivergenceBound = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """As `dppo_tv`, but 0 where a token moved in A's direction by a binary KL(old ‖ policy) above
    the bound.

    Binary: over the distributions {this token, any other}.
    """
    policy, old = probabilities(log_probs, old_log_probs, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    others = torch.log((1.0 - old + EPSILON) / (1.0 - policy + EPSILON))
    divergence = -old * difference + (1.0 - old) * others
    rises = (divergence <= clip_ratio_high) | (policy <= old)
    falls = (divergence <= clip_ratio_low) | (policy >= old)
    inside = torch.where(under_mask(advantages, loss_mask) > 0, rises, falls)

    return masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)
