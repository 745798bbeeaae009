"""PPO: a critic's values are the baseline, and the ratio to the old policy is clipped."""

from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, check_dual_clip, clipped_surrogate
from distflow.algorithms.masked_reductions import log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "Schulman et al. 2017, arXiv:1707.06347"
SETTINGS = """
dag: {pipeline: ppo}
algorithm:
  adv_estimator: gae
  gamma: 1.0
  lam: 0.95
  use_kl_in_reward: true
  kl_ctrl: {kl_coef: 0.001}
actor_rollout_ref:
  actor: {entropy_coef: 0.0}
  rollout: {n: 1}
critic: {cliprange_value: 0.5}
trainer: {experiment_name: ppo_training}
"""


@register_policy_loss("vanilla", check=check_dual_clip)
def compute_vanilla_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """max(−rA, −clip(r)A), for A < 0 at most −c·A, per token; all tensors `(bs, response_length)`.

    `clip_ratio_c` None turns the dual clip off.
    """
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(
        difference.exp(), advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    return loss, stats | {"ppo_kl": -difference.detach()}
