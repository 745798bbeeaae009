"""SAPO: a soft gate in place of the clip."""

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "Gao et al. 2025, arXiv:2511.20347"
SETTINGS = """
defaults: [grpo, _self_]
actor_rollout_ref:
  actor:
    policy_loss: sapo
    policy_loss_kwargs: {tau_pos: 1.0, tau_neg: 1.05}
    loss_agg_mode: seq-mean-token-mean
    use_kl_loss: false
trainer: {experiment_name: sapo_training}
"""


def check_temperatures(tau_pos: float, tau_neg: float) -> None:
    """Raises ValueError if one is not positive."""
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be positive, not {tau_pos} and {tau_neg}")


@register_policy_loss("sapo", check=check_temperatures)
def compute_sapo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, Stats]:
    """−(4/τ)·σ(τ(r − 1))·A per token, τ = tau_pos where A > 0, else tau_neg; all
    `(bs, response_length)`.

    The paper aggregates by `seq-mean-token-mean`.
    """
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)
    tau = torch.where(
        advantages > 0, torch.full_like(advantages, tau_pos), torch.full_like(advantages, tau_neg)
    )
    gate = torch.sigmoid(tau * (difference.exp() - 1.0)) * (4.0 / tau)
    return -gate * advantages, {"ppo_kl": -difference.detach()}
