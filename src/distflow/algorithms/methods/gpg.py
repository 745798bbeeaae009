"""GPG: the plain policy gradient, with a correction for groups without a signal."""

from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import (
    GroupRule,
    Groups,
    group_advantage,
    on_tokens,
    sample_scores,
)
from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import Reduce, global_sum, under_mask
from distflow.algorithms.registry import register_adv_est, register_policy_loss

PAPER = "Chu et al. 2025, arXiv:2504.02546"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: gpg}
actor_rollout_ref:
  actor:
    policy_loss: gpg  # equation 5, as numbered at ICLR 2026
    loss_agg_mode: token-mean
    use_kl_loss: false
trainer: {experiment_name: gpg_training}
"""


AlphaCounts = Literal["groups", "rewards"]


@register_adv_est("gpg", scope="global")
def compute_gpg_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    f_norm: float = 1.0,
    alpha_counts: AlphaCounts = "groups",
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """α · (reward − mean of its group) / f_norm on every policy token; returns are the same.

    The quotient is equation 6 of the paper (ICLR 2026); α = B / (B − M), equations 7 and 8,
    compensates for the M of B samples with zero advantage, whose group has equal rewards. B and M
    count valid samples of the
    global batch. With `alpha_counts="rewards"` B − M is the number of samples with a reward other
    than 0, as in verl. A group of one keeps its reward, times α.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    groups = Groups(group_index, valid)
    centred = group_advantage(scores, group_index, GroupRule(), valid)

    if alpha_counts == "groups":
        counted = groups.sum(centred != 0) > 0
    else:
        counted = scores != 0

    counts = torch.stack([groups.valid.sum(), (groups.valid & counted).sum()]).double()
    num_samples, num_counted = global_sum(counts, reduce).unbind()
    advantages = on_tokens(num_samples / num_counted.clamp(min=1) * centred / f_norm, response_mask)
    return advantages, advantages.clone()


@register_policy_loss("gpg")
def compute_gpg_loss(
    log_probs: Tensor, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Stats]:
    """−logπ·A per token; all tensors `(bs, response_length)`."""
    return -under_mask(log_probs, loss_mask) * under_mask(advantages, loss_mask), {}
