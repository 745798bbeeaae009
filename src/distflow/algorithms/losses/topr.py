"""Tapered off-policy REINFORCE: good answers unweighted, bad ones by a ratio of at most 1 (arXiv:2503.14286)."""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import sample_scores
from distflow.algorithms.losses.ratio import Stats, as_stat, log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


@register_policy_loss("topr")
def compute_topr_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_level_scores: Tensor,
    old_log_probs: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """−A·logπ where the sample's score is above 0, else −sg[clamp(r, 0, 1)]·A·logπ; all `(bs, response_length)`.

    token_level_scores: summed over each row; a `(bs,)` tensor is one score a sample.
    """
    score = token_level_scores if token_level_scores.dim() == 1 else sample_scores(token_level_scores, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    tapered = ratio.clamp(0.0, 1.0)
    good = (score > 0)[:, None]
    weight = torch.where(good, torch.ones_like(ratio), tapered)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    return loss, {"pg_clipfrac": as_stat(~good & (ratio > 1.0), ratio), "ppo_kl": -difference}
