"""Group sequence policy optimisation: one ratio a sequence (Zheng et al. 2025, arXiv:2507.18071)."""

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, clip_range, clipped_surrogate, raw_log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss

MAX_LOG_SEQUENCE_RATIO = 10.0


@register_policy_loss("gspo")
def compute_gspo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Stats]:
    """max(−sA, −clip(s)A) per token, s_t = sg[s] · π_t / sg[π_t] (GSPO-token); all `(bs, response_length)`.

    log s is the mean log-ratio of the sequence, capped at 10. The paper aggregates by `seq-mean-token-mean`.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    sequence = (difference.sum(dim=-1, keepdim=True) / lengths).detach()
    token_part = difference - difference.detach()
    ratio = torch.exp((sequence + token_part).clamp(max=MAX_LOG_SEQUENCE_RATIO))
    loss, stats = clipped_surrogate(ratio, under_mask(advantages, loss_mask), low, high, clip_ratio_c=None)
    return loss, stats | {"ppo_kl": -difference.detach()}
