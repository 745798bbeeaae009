"""TOPR: good responses count in full, bad ones by a ratio of at most 1."""

from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import sample_scores
from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import (
    MAX_LOG_RATIO,
    as_stat,
    log_ratio,
    raw_log_ratio,
    under_mask,
)
from distflow.algorithms.registry import register_policy_loss

PAPER = "Le Roux et al. 2025, arXiv:2503.14286"
SETTINGS = """
defaults: [grpo, _self_]
algorithm:
  adv_estimator: reinforce  # equation 8 has the reward itself, 1 or -1
  reward_shift: -0.5  # from scores of 1 and 0
  reward_scale: 2.0
actor_rollout_ref:
  actor:
    policy_loss: topr
    policy_loss_kwargs: {ratio_level: sequence}  # equation 8: of the whole response
    use_kl_loss: false
trainer: {experiment_name: topr_training}
"""


@register_policy_loss("topr")
def compute_topr_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_level_scores: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    ratio_level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Stats]:
    """−A·logπ where the sample's score is above 0, else −sg[clamp(r, 0, 1)]·A·logπ; all
    `(bs, response_length)`.

    token_level_scores: summed over each row; a `(bs,)` tensor is one score per sample. ratio_level:
    r of each token (ROLL), or the product over the sequence (the paper).
    """
    if token_level_scores.dim() == 1:
        score = token_level_scores
    else:
        score = sample_scores(token_level_scores, loss_mask)

    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    if ratio_level == "sequence":
        total = (
            raw_log_ratio(log_probs, old_log_probs, loss_mask).detach().sum(dim=-1, keepdim=True)
        )
        ratio = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(difference)

    tapered = ratio.clamp(0.0, 1.0)
    good = (score > 0)[:, None]
    weight = torch.where(good, torch.ones_like(ratio), tapered)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)

    return loss, {"pg_clipfrac": as_stat(~good & (ratio > 1.0), ratio), "ppo_kl": -difference}
