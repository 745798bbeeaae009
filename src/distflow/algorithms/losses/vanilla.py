"""PPO's clipped loss (arXiv:1707.06347) with clip-higher (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729)."""

from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, check_dual_clip, clip_range, clipped_surrogate, log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


@register_policy_loss("vanilla", check=check_dual_clip)
def compute_vanilla_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """max(−rA, −clip(r)A), for A < 0 at most −c·A, per token; all tensors `(bs, response_length)`.

    `clip_ratio_c` None turns the dual clip off. Raises ValueError if it is not above 1.
    """
    check_dual_clip(clip_ratio_c)
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    loss, stats = clipped_surrogate(difference.exp(), under_mask(advantages, loss_mask), low, high, clip_ratio_c)
    return loss, stats | {"ppo_kl": -difference.detach()}
