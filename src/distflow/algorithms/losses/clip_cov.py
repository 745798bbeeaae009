"""Clip-Cov: a few of the tokens that lower the entropy most get no gradient (Cui et al. 2025, arXiv:2505.22617).

Options as in verl and the authors' code (PRIME-RL/Entropy-Mechanism-of-RL). These choose anew in each micro-batch, by
the policy of that moment; here the choice is made once for the whole step, by the policy before its first update.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.algorithms.covariance import check_share, largest, num_selected, token_covariance, token_draws
from distflow.algorithms.losses.ratio import Stats, as_stat, clip_range, clipped_surrogate, log_ratio
from distflow.algorithms.masking import Reduce, under_mask
from distflow.algorithms.registry import register_policy_loss
from distflow.graph.spec import node


def check_selection(clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float) -> None:
    """Raises ValueError for a share outside 0..1 or bounds with nothing between them."""
    check_share("clip_cov_ratio", clip_cov_ratio)
    if not clip_cov_lb < clip_cov_ub:
        raise ValueError(f"clip_cov_lb must be below clip_cov_ub, not {clip_cov_lb} and {clip_cov_ub}")


@node(writes="selected_tokens", scope="global")
def select_clip_cov(
    advantages: Tensor,
    old_log_probs: Tensor,
    loss_mask: Tensor,
    uid: Sequence[str],
    reduce: Reduce | None = None,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """1 on `clip_cov_ratio` of the step's tokens (at least one), drawn from those with a covariance within the bounds.

    `(bs, response_length)`, float32; fewer where fewer are within. uid: names the samples for the draws.
    Raises ValueError for options without sense.
    """
    check_selection(clip_cov_ratio, clip_cov_lb, clip_cov_ub)
    covariance = token_covariance(advantages, old_log_probs, loss_mask, reduce)
    within = (loss_mask > 0) & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    draws = token_draws(uid, loss_mask)
    return largest(draws, draws, within, num_selected(clip_cov_ratio, loss_mask, reduce), reduce).float()


@register_policy_loss("clip_cov", check=check_selection, selects=select_clip_cov)
def compute_clip_cov_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    selected_tokens: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Stats]:
    """max(−rA, −clip(r)A) per token, 0 on the selected ones; all `(bs, response_length)`. No dual clip."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    loss, stats = clipped_surrogate(difference.exp(), under_mask(advantages, loss_mask), low, high, clip_ratio_c=None)
    selected = under_mask(selected_tokens, loss_mask) > 0
    loss = torch.where(selected, torch.zeros_like(loss), loss)
    return loss, stats | {"cov_selected": as_stat(selected, loss), "ppo_kl": -difference.detach()}
