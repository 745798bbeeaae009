"""Soft adaptive policy optimisation: a smooth gate in place of the clip (Gao et al. 2025, arXiv:2511.20347)."""

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


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
    """−(4/τ)·σ(τ(r − 1))·A per token, τ = tau_pos where A > 0, else tau_neg; all `(bs, response_length)`.

    Raises ValueError if a τ is not positive. The paper aggregates by `seq-mean-token-mean`.
    """
    check_temperatures(tau_pos, tau_neg)
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), torch.full_like(advantages, tau_neg))
    gate = torch.sigmoid(tau * (difference.exp() - 1.0)) * (4.0 / tau)
    return -gate * advantages, {"ppo_kl": -difference.detach()}
