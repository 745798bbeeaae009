"""What policy losses share: log-ratios that are safe under a mask, and clip bounds."""

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import under_mask

MAX_LOG_RATIO = 20.0

Stats = dict[str, Tensor]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor) -> Tensor:
    """log_probs − old_log_probs clamped to ±20, 0 outside the mask, `(bs, response_length)`.

    Without old log-probs it is taken against the detached log-probs: 0, with the gradient of log_probs.
    """
    return raw_log_ratio(log_probs, old_log_probs, loss_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def raw_log_ratio(log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor) -> Tensor:
    """As `log_ratio`, unclamped."""
    current = under_mask(log_probs, loss_mask)
    old = current.detach() if old_log_probs is None else under_mask(old_log_probs, loss_mask)
    return current - old


def clip_range(clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None) -> tuple[float, float]:
    """How far the ratio may go below and above 1; each bound is `clip_ratio` where it is not set."""
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    return low, high


def as_stat(flags: Tensor, like: Tensor) -> Tensor:
    """A condition per token as numbers, for averaging."""
    return flags.to(like.dtype)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Stats]:
    """PPO's pessimistic loss per token: max(−rA, −clip(r, 1 − low, 1 + high)A), for A < 0 at most −cA (dual clip)."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    stats = {"pg_clipfrac": as_stat(clipped > plain, ratio)}
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        stats["pg_clipfrac_lower"] = as_stat(over, ratio)
    return loss, stats


def check_dual_clip(clip_ratio_c: float | None) -> None:
    """Raises ValueError for a dual clip that would cut the ratio 1 itself."""
    if clip_ratio_c is not None and not clip_ratio_c > 1.0:
        raise ValueError(f"clip_ratio_c must be above 1, or null to turn the dual clip off; not {clip_ratio_c}")
