"""GSPO: one clipped ratio for a whole sequence."""

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, clipped_surrogate
from distflow.algorithms.masked_reductions import raw_log_ratio, under_mask
from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.registry import register_adv_est, register_policy_loss

PAPER = "Zheng et al. 2025, arXiv:2507.18071"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: gspo}
actor_rollout_ref:
  actor:
    policy_loss: gspo
    clip_ratio_low: 3e-4  # section 5.1
    clip_ratio_high: 4e-4
    loss_agg_mode: seq-mean-token-mean  # equation 5
    use_kl_loss: false  # its objective has no KL
trainer: {experiment_name: gspo_training}
"""


MAX_LOG_SEQUENCE_RATIO = 10.0
compute_gspo_advantage = register_adv_est("gspo", scope="global")(compute_grpo_advantage)


@register_policy_loss("gspo")
def compute_gspo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """max(−sA, −clip(s)A) per token, s_t = sg[s] · π_t / sg[π_t] (GSPO-token); all
    `(bs, response_length)`.

    log s is the mean log-ratio of the sequence, capped at 10. The paper aggregates by
    `seq-mean-token-mean`.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    sequence = (difference.sum(dim=-1, keepdim=True) / lengths).detach()
    token_part = difference - difference.detach()
    ratio = torch.exp((sequence + token_part).clamp(max=MAX_LOG_SEQUENCE_RATIO))
    loss, stats = clipped_surrogate(
        ratio, under_mask(advantages, loss_mask), clip_ratio_low, clip_ratio_high, None
    )

    return loss, stats | {"ppo_kl": -difference.detach()}
