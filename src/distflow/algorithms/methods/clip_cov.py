"""Clip-Cov: PPO's clip, without the gradient of a few of the tokens that lower the entropy most."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, clipped_surrogate
from distflow.algorithms.losses.token_selection import (
    check_share,
    largest,
    num_selected,
    token_covariance,
    token_draws,
)
from distflow.algorithms.masked_reductions import Reduce, as_stat, log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss
from distflow.graph.node_spec import node

PAPER = "Cui et al. 2025, arXiv:2505.22617"
SETTINGS = """
defaults: [grpo, _self_]
actor_rollout_ref:
  actor:
    policy_loss: clip_cov
    policy_loss_kwargs: {clip_cov_ratio: 0.0002, clip_cov_lb: 1.0, clip_cov_ub: 5.0}
    use_kl_loss: false
trainer: {experiment_name: clip_cov_training}
"""


def check_selection(clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float) -> None:
    """Raises ValueError for a share outside 0..1 or an empty range of bounds."""
    check_share("clip_cov_ratio", clip_cov_ratio)
    if not clip_cov_lb < clip_cov_ub:
        raise ValueError(
            f"clip_cov_lb must be below clip_cov_ub, not {clip_cov_lb} and {clip_cov_ub}"
        )


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
    """1 on a share `clip_cov_ratio` of the step's tokens (at least one), drawn where the covariance
    is within bounds.

    `(bs, response_length)`, float32; fewer if fewer are within bounds. uid: identifies the samples
    for the draws.
    """
    covariance = token_covariance(advantages, old_log_probs, loss_mask, reduce)
    within = (loss_mask > 0) & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    draws = token_draws(uid, loss_mask)
    return largest(
        draws, draws, within, num_selected(clip_cov_ratio, loss_mask, reduce), reduce
    ).float()


@register_policy_loss("clip_cov", check=check_selection, selects=select_clip_cov)
def compute_clip_cov_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    selected_tokens: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """max(−rA, −clip(r)A) per token, 0 on the selected ones; all `(bs, response_length)`. No dual
    clip."""
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(
        difference.exp(), advantages, clip_ratio_low, clip_ratio_high, None
    )
    selected = under_mask(selected_tokens, loss_mask) > 0
    loss = torch.where(selected, torch.zeros_like(loss), loss)

    return loss, stats | {"cov_selected": as_stat(selected, loss), "ppo_kl": -difference.detach()}
