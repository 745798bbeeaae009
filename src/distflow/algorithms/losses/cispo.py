"""CISPO: a clipped, gradient-free importance weight on every token's log-prob (MiniMax 2025, arXiv:2506.13585)."""

from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, as_stat, clip_range, log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


@register_policy_loss("cispo")
def compute_cispo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_below: bool = True,
) -> tuple[Tensor, Stats]:
    """−sg[clip(r, 1 − ε_low, 1 + ε_high)]·A·logπ per token; all `(bs, response_length)`.

    `clip_below` False drops the lower bound, as the paper does.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    weight = ratio.clamp(1.0 - low if clip_below else 0.0, 1.0 + high)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    return loss, {"pg_clipfrac": as_stat(weight != ratio, ratio), "ppo_kl": -difference}
