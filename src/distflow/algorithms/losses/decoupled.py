"""Decoupled PPO: clip against a recent policy, weigh by the one that sampled (Hilton et al. 2022, arXiv:2110.00641).

As AReaL uses it for stale rollouts (arXiv:2505.24298).
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import (
    Stats,
    as_stat,
    check_dual_clip,
    clip_range,
    clipped_surrogate,
    log_ratio,
    raw_log_ratio,
)
from distflow.algorithms.losses.rejection_sampling import RejectionSampling, behaviour_weights
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


def check_options(
    clip_ratio_c: float | None, behav_imp_weight_mode: str, rejection_sampling: Mapping[str, object] | None
) -> None:
    """Raises ValueError for options without sense."""
    check_dual_clip(clip_ratio_c)
    if behav_imp_weight_mode not in ("mask", "clamp", "disabled"):
        raise ValueError(f"behav_imp_weight_mode must be mask, clamp or disabled, not '{behav_imp_weight_mode}'")
    if behav_imp_weight_mode == "disabled" and rejection_sampling is not None:
        raise ValueError("rejection_sampling makes the weights that behav_imp_weight_mode=disabled turns off")
    if rejection_sampling is not None:
        RejectionSampling.of(rejection_sampling)


@register_policy_loss("decoupled", check=check_options)
def compute_decoupled_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    prox_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
    behav_imp_weight_cap: float | None = 5.0,
    behav_imp_weight_mode: Literal["mask", "clamp", "disabled"] = "mask",
    rejection_sampling: Mapping[str, object] | None = None,
) -> tuple[Tensor, Stats]:
    """exp(prox − old) · the clipped loss of the ratio exp(log_probs − prox), per token; all `(bs, response_length)`.

    old_log_probs: of the policy that sampled. Tokens whose weight is above the cap get loss 0 and stay in the
    denominator, or with mode `clamp` the cap as their weight; None means no cap. `rejection_sampling`, a mapping of the
    names of `RejectionSampling`, decides in place of cap and mode. Mode `disabled` weighs nothing, where another
    correction does. Raises ValueError for bad options.
    """
    check_options(clip_ratio_c, behav_imp_weight_mode, rejection_sampling)
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = log_ratio(log_probs, prox_log_probs, loss_mask)
    behaviour = log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
    loss, stats = clipped_surrogate(difference.exp(), under_mask(advantages, loss_mask), low, high, clip_ratio_c)
    stats |= {"ppo_kl": -difference.detach(), "behav_kl": -behaviour}
    if behav_imp_weight_mode == "disabled":
        return loss, stats
    weight = behaviour.exp()
    above = torch.zeros_like(weight, dtype=torch.bool)
    if rejection_sampling is not None:
        unclamped = raw_log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
        weight, above = behaviour_weights(unclamped, loss_mask, RejectionSampling.of(rejection_sampling))
    elif behav_imp_weight_cap is not None:
        above = weight > behav_imp_weight_cap
        kept = torch.zeros_like(weight) if behav_imp_weight_mode == "mask" else weight.clamp(max=behav_imp_weight_cap)
        weight = torch.where(above, kept, weight)
    return loss * weight, stats | {"behav_imp_weight": weight, "behav_capped": as_stat(above, weight)}
