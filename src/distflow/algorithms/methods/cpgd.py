"""CPGD: a policy gradient whose log-prob is clipped, with a pull against drift."""

import math

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import as_stat, log_ratio, under_mask
from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.registry import register_adv_est, register_policy_loss

PAPER = "Liu et al. 2025, arXiv:2505.12504"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: cpgd}
actor_rollout_ref:
  actor:
    policy_loss: cpgd
    # policy_loss_kwargs: {policy_drift_coeff: 0.001} adds the pull against drift
    use_kl_loss: false
trainer: {experiment_name: cpgd_training}
"""


MAX_DRIFT = 2.0
compute_cpgd_advantage = register_adv_est("cpgd", scope="global")(compute_grpo_advantage)


def check_drift(policy_drift_coeff: float) -> None:
    """Raises ValueError for a coefficient below 0."""
    if not policy_drift_coeff >= 0:
        raise ValueError(
            f"policy_drift_coeff must be 0 (off) or above, e.g. 0.001, not {policy_drift_coeff}"
        )


@register_policy_loss("cpgd", check=check_drift)
def compute_cpgd_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    policy_drift_coeff: float = 0.0,
) -> tuple[Tensor, Stats]:
    """−clamp(logπ)·A + policy_drift_coeff · sg[min(r − 1, 2)]·logπ per token; all
    `(bs, response_length)`.

    The clamp is from above at logπ_old + ln(1 + ε_high) where A > 0, else from below at logπ_old +
    ln(1 − ε_low). The drift's gradient is that of KL(old ‖ policy), estimated by k3 (r − 1 − ln r)
    and bounded; the statistic `policy_drift` is that estimate.
    """
    current = under_mask(log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)

    if old_log_probs is None:
        old = current.detach()
    else:
        old = under_mask(old_log_probs, loss_mask)

    ceiling = old + math.log1p(clip_ratio_high)
    floor = old + (math.log1p(-clip_ratio_low) if clip_ratio_low < 1.0 else -math.inf)
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
