"""Policy-gradient losses without PPO's clip: GPG, CPGD, DRO, TOPR, SAPO and CISPO.

- GPG: the plain −logπ·A (Chu et al. 2025, arXiv:2504.02546, equation 5 as numbered at ICLR 2026).
  The paper's mean is `token-mean`; its α and F_norm are in its advantage, the estimator `gpg`.
- CPGD: the log-prob itself is clipped (Liu et al. 2025, arXiv:2505.12504); the drift is the term of
  siiRL's actor (`policy_drift_coeff`).
- DRO: a quadratic pull to the old policy (Richemond et al. 2024, arXiv:2405.19107; Kimi k1.5,
  arXiv:2501.12599); per token as in Tinker's `dro` and ROLL's `kimi15`.
- TOPR: good responses unweighted, bad ones weighted by a ratio of at most 1 (Le Roux et al. 2025,
  arXiv:2503.14286, eq. 8: Σ_{T+} μ(τ) R(τ) ∇log π(τ) + Σ_{T−} μ(τ) [π(τ)/μ(τ)]₀¹ R(τ) ∇log π(τ)).
  The paper's ratio is of the whole response τ; ROLL takes it per token.
- SAPO: a smooth gate in place of the clip (Gao et al. 2025, arXiv:2511.20347).
- CISPO: a clipped, gradient-free importance weight on every token's log-prob (MiniMax 2025,
  arXiv:2506.13585).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import sample_scores
from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import (
    MAX_LOG_RATIO,
    as_stat,
    log_ratio,
    raw_log_ratio,
    under_mask,
)
from distflow.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
def compute_gpg_loss(
    log_probs: Tensor, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Stats]:
    """−logπ·A per token; all tensors `(bs, response_length)`."""
    return -under_mask(log_probs, loss_mask) * under_mask(advantages, loss_mask), {}


MAX_DRIFT = 2.0


def check_drift(policy_drift_coeff: float) -> None:
    """Raises ValueError for a coefficient below 0."""
    if not policy_drift_coeff >= 0:
        raise ValueError(
            f"policy_drift_coeff must be 0 (off) or above, e.g. 0.001, not {policy_drift_coeff}"
        )


@register_policy_loss("cpgd", check=check_drift)
def compute_cpgd_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    policy_drift_coeff: float = 0.0,
) -> tuple[Tensor, Stats]:
    """−clamp(logπ)·A + policy_drift_coeff · sg[min(r − 1, 2)]·logπ per token; all
    `(bs, response_length)`.

    The clamp is from above at logπ_old + ln(1 + ε_high) where A > 0, else from below at logπ_old +
    ln(1 − ε_low). The drift's gradient is that of KL(old ‖ policy), estimated by k3 (r − 1 − ln r)
    and bounded; the statistic `policy_drift` is that estimate.
    """
    current = under_mask(log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)

    if old_log_probs is None:
        old = current.detach()
    else:
        old = under_mask(old_log_probs, loss_mask)

    ceiling = old + math.log1p(clip_ratio_high)
    floor = old + (math.log1p(-clip_ratio_low) if clip_ratio_low < 1.0 else -math.inf)
    positive = advantages > 0
    outside = torch.where(positive, current > ceiling, current < floor)
    clipped = torch.where(outside, torch.where(positive, ceiling, floor), current)
    loss = -clipped * advantages
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()

    stats = {"pg_clipfrac": as_stat(outside, current), "ppo_kl": -difference}
    if policy_drift_coeff:
        excess = difference.exp() - 1.0
        loss = loss + policy_drift_coeff * excess.clamp(max=MAX_DRIFT) * current
        stats["policy_drift"] = excess - difference

    return loss, stats


def check_beta(beta: float) -> None:
    """Raises ValueError for a coefficient below 0."""
    if not beta >= 0:
        raise ValueError(f"beta must be 0 or above, e.g. 0.1, not {beta}")


@register_policy_loss("dro", check=check_beta)
def compute_dro_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, Stats]:
    """−logπ·A + beta/2 · (logπ − logπ_old)² per token; all `(bs, response_length)`.

    The log-ratio is not clamped: the pull must not vanish far away.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    loss = (
        -under_mask(log_probs, loss_mask) * under_mask(advantages, loss_mask)
        + 0.5 * beta * difference.square()
    )
    return loss, {"ppo_kl": -difference.detach()}


@register_policy_loss("topr")
def compute_topr_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_level_scores: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    ratio_level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Stats]:
    """−A·logπ where the sample's score is above 0, else −sg[clamp(r, 0, 1)]·A·logπ; all
    `(bs, response_length)`.

    token_level_scores: summed over each row; a `(bs,)` tensor is one score per sample. ratio_level:
    r of each token (ROLL), or the product over the sequence (the paper).
    """
    if token_level_scores.dim() == 1:
        score = token_level_scores
    else:
        score = sample_scores(token_level_scores, loss_mask)

    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    if ratio_level == "sequence":
        total = (
            raw_log_ratio(log_probs, old_log_probs, loss_mask).detach().sum(dim=-1, keepdim=True)
        )
        ratio = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(difference)

    tapered = ratio.clamp(0.0, 1.0)
    good = (score > 0)[:, None]
    weight = torch.where(good, torch.ones_like(ratio), tapered)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)

    return loss, {"pg_clipfrac": as_stat(~good & (ratio > 1.0), ratio), "ppo_kl": -difference}


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


@register_policy_loss("cispo")
def compute_cispo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_below: bool = True,
) -> tuple[Tensor, Stats]:
    """−sg[clip(r, 1 − ε_low, 1 + ε_high)]·A·logπ per token; all `(bs, response_length)`.

    `clip_below` False drops the lower bound, as the paper does.
    """
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    weight = ratio.clamp(1.0 - clip_ratio_low if clip_below else 0.0, 1.0 + clip_ratio_high)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    return loss, {"pg_clipfrac": as_stat(weight != ratio, ratio), "ppo_kl": -difference}
