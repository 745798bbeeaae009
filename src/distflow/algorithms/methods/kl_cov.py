"""KL-Cov: the tokens that lower the entropy most are pulled to the old policy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
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
    policy_loss: kl_cov
    policy_loss_kwargs: {kl_cov_ratio: 0.0002, ppo_kl_coef: 1.0}
    use_kl_loss: false
trainer: {experiment_name: kl_cov_training}
"""


def check_options(kl_cov_ratio: float, ppo_kl_coef: float) -> None:
    """Raises ValueError for a share outside 0..1 or a coefficient below 0."""
    check_share("kl_cov_ratio", kl_cov_ratio)
    if not ppo_kl_coef >= 0:
        raise ValueError(f"ppo_kl_coef must be 0 or above, e.g. 1.0, not {ppo_kl_coef}")


@node(writes="selected_tokens", scope="global")
def select_kl_cov(
    advantages: Tensor,
    old_log_probs: Tensor,
    loss_mask: Tensor,
    uid: Sequence[str],
    reduce: Reduce | None = None,
    *,
    kl_cov_ratio: float = 0.0002,
) -> Tensor:
    """1 on the share `kl_cov_ratio` of the step's tokens (at least one) with the largest
    covariance; ties are drawn.

    `(bs, response_length)`, float32.
    """
    covariance = token_covariance(advantages, old_log_probs, loss_mask, reduce)
    count = num_selected(kl_cov_ratio, loss_mask, reduce)
    return largest(covariance, token_draws(uid, loss_mask), loss_mask > 0, count, reduce).float()


@register_policy_loss("kl_cov", check=check_options, selects=select_kl_cov)
def compute_kl_cov_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    selected_tokens: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    ppo_kl_coef: float = 1.0,
) -> tuple[Tensor, Stats]:
    """−rA per token, plus ppo_kl_coef · |log r| on the selected ones, unclipped; all
    `(bs, response_length)`."""
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    selected = under_mask(selected_tokens, loss_mask) > 0
    penalty = torch.where(selected, ppo_kl_coef * difference.abs(), torch.zeros_like(difference))
    loss = -under_mask(advantages, loss_mask) * difference.exp() + penalty
    return loss, {"cov_selected": as_stat(selected, loss), "ppo_kl": -difference.detach()}
