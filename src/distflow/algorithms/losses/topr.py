"""Tapered off-policy REINFORCE: good answers unweighted, bad ones by a ratio of at most 1.

Le Roux et al. 2025, arXiv:2503.14286, eq. 8: Σ_{T+} μ(τ) R(τ) ∇log π(τ) + Σ_{T−} μ(τ) [π(τ)/μ(τ)]₀¹ R(τ) ∇log π(τ),
whose ratio is that of the whole answer τ. ROLL takes it per token.
"""

from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import sample_scores
from distflow.algorithms.losses.ratio import MAX_LOG_RATIO, Stats, as_stat, log_ratio, raw_log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss

RATIO_LEVELS = ("token", "sequence")


def check_ratio_level(ratio_level: str) -> None:
    """Raises ValueError for an unknown level."""
    if ratio_level not in RATIO_LEVELS:
        raise ValueError(f"ratio_level '{ratio_level}' is unknown; choose one of {', '.join(RATIO_LEVELS)}")


@register_policy_loss("topr", check=check_ratio_level)
def compute_topr_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_level_scores: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    ratio_level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Stats]:
    """−A·logπ where the sample's score is above 0, else −sg[clamp(r, 0, 1)]·A·logπ; all `(bs, response_length)`.

    token_level_scores: summed over each row; a `(bs,)` tensor is one score a sample. ratio_level: r of each token
    (ROLL), or the product over the sequence (the paper). Raises ValueError for an unknown level.
    """
    check_ratio_level(ratio_level)
    score = token_level_scores if token_level_scores.dim() == 1 else sample_scores(token_level_scores, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    if ratio_level == "sequence":
        total = raw_log_ratio(log_probs, old_log_probs, loss_mask).detach().sum(dim=-1, keepdim=True)
        ratio = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(difference)
    tapered = ratio.clamp(0.0, 1.0)
    good = (score > 0)[:, None]
    weight = torch.where(good, torch.ones_like(ratio), tapered)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    return loss, {"pg_clipfrac": as_stat(~good & (ratio > 1.0), ratio), "ppo_kl": -difference}
