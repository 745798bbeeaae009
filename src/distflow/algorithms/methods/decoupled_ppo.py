"""Decoupled PPO: clipped around a recent policy, weighted by the one that sampled."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.losses.behaviour_weights import RejectionSampling, behaviour_weights
from distflow.algorithms.losses.clipped_ratio import Stats, check_dual_clip, clipped_surrogate
from distflow.algorithms.masked_reductions import as_stat, log_ratio, raw_log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "Hilton et al. 2022, arXiv:2110.00641; as AReaL uses it, Fu et al. 2025, arXiv:2505.24298"
SETTINGS = """
# as AReaL v0.3: at most 4 steps stale, returns neither discounted nor bootstrapped from afar, no KL
defaults: [ppo, _self_]
async: {max_staleness: 4}
algorithm:
  lam: 1.0
  use_kl_in_reward: false
actor_rollout_ref:
  actor: {policy_loss: decoupled}
trainer: {experiment_name: decoupled_ppo_training}
"""


def check_corrections(
    clip_ratio_c: float | None,
    behav_imp_weight_mode: str,
    rejection_sampling: Mapping[str, object] | None,
) -> None:
    """Raises ValueError for invalid options."""
    check_dual_clip(clip_ratio_c)
    if behav_imp_weight_mode == "disabled" and rejection_sampling is not None:
        raise ValueError(
            "rejection_sampling computes the weights that behav_imp_weight_mode=disabled turns off"
        )

    if rejection_sampling is not None:
        RejectionSampling.of(rejection_sampling)


@register_policy_loss("decoupled", check=check_corrections)
def compute_decoupled_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    prox_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    behav_imp_weight_cap: float | None = 5.0,
    behav_imp_weight_mode: Literal["mask", "clamp", "disabled"] = "mask",
    rejection_sampling: Mapping[str, object] | None = None,
) -> tuple[Tensor, Stats]:
    """exp(prox − old) · the clipped loss of the ratio exp(log_probs − prox), per token; all
    `(bs, response_length)`.

    old_log_probs: of the policy that sampled. Tokens with a weight above the cap get loss 0 and
    stay in the denominator, or with mode `clamp` the cap as weight; None means no cap.
    `rejection_sampling`, a mapping with the fields of `RejectionSampling`, replaces cap and mode.
    Mode `disabled` sets no weights, for use with another correction.
    """
    difference = log_ratio(log_probs, prox_log_probs, loss_mask)
    behaviour = log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(
        difference.exp(), advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    stats |= {"ppo_kl": -difference.detach(), "behave_kl": -behaviour}
    if behav_imp_weight_mode == "disabled":
        return loss, stats

    weight = behaviour.exp()
    above = torch.zeros_like(weight, dtype=torch.bool)
    if rejection_sampling is not None:
        unclamped = raw_log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
        weight, above = behaviour_weights(
            unclamped, loss_mask, RejectionSampling.of(rejection_sampling)
        )
    elif behav_imp_weight_cap is not None:
        above = weight > behav_imp_weight_cap
        if behav_imp_weight_mode == "mask":
            replacement = torch.zeros_like(weight)
        else:
            replacement = weight.clamp(max=behav_imp_weight_cap)
        weight = torch.where(above, replacement, weight)

    return loss * weight, stats | {
        "behave_imp_weight": weight,
        "behave_capped": as_stat(above, weight),
    }
