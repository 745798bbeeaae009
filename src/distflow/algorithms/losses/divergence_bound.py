"""What the losses of DPPO share: the gradient of the tokens whose change is within a bound."""

from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import as_stat, log_ratio, under_mask

DivergenceBound = float
"""A clip of the actor that bounds a divergence, not a ratio."""


def probabilities(
    log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(policy, old policy) of each token without gradient, at most 1 despite rounding; 1 outside
    the mask."""
    policy = under_mask(log_probs.detach(), loss_mask).clamp(max=0.0).exp()
    if old_log_probs is None:
        return policy, policy

    old = under_mask(old_log_probs, loss_mask).clamp(max=0.0).exp()
    return policy, old


def masked_gradient(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None,
    inside: Tensor,
    clip_ratio_c: float | None,
) -> tuple[Tensor, Stats]:
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    truncated = ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c)
    weight = as_stat(inside, ratio) * truncated
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    stats = {"pg_clipfrac": as_stat(~inside, ratio), "ppo_kl": -difference}
    if clip_ratio_c is not None:
        stats["pg_clipfrac_lower"] = as_stat(inside & (ratio > clip_ratio_c), ratio)
    return loss, stats
