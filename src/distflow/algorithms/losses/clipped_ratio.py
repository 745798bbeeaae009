"""PPO's clipped loss (arXiv:1707.06347) with clip-higher (DAPO, arXiv:2503.14476) and dual clip
(arXiv:1912.09729), and its relatives.

- GSPO: one ratio a sequence (Zheng et al. 2025, arXiv:2507.18071).
- GMPO: geometric mean of the ratios (Zhao et al. 2025, arXiv:2507.20673).
- DPPO: a token is excluded if the policy moved too far in probability, not in ratio
  (arXiv:2602.04879), by the binary approximations of the divergence, as in verl's `dppo_tv` and
  `dppo_kl`. The clip options bound the divergence.
"""

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import as_stat, log_ratio, raw_log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

Stats = dict[str, Tensor]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Stats]:
    """PPO's pessimistic loss per token: max(−rA, −clip(r, 1 − low, 1 + high)A), for A < 0 at most
    −cA (dual clip)."""
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
    """Raises ValueError for a dual clip that would clip even a ratio of 1."""
    if clip_ratio_c is not None and not clip_ratio_c > 1.0:
        raise ValueError(
            f"clip_ratio_c must be above 1, or null to disable the dual clip; not {clip_ratio_c}"
        )


@register_policy_loss("vanilla", check=check_dual_clip)
def compute_vanilla_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """max(−rA, −clip(r)A), for A < 0 at most −c·A, per token; all tensors `(bs, response_length)`.

    `clip_ratio_c` None turns the dual clip off.
    """
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(
        difference.exp(), advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    return loss, stats | {"ppo_kl": -difference.detach()}


MAX_LOG_SEQUENCE_RATIO = 10.0


@register_policy_loss("gspo")
def compute_gspo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """max(−sA, −clip(s)A) per token, s_t = sg[s] · π_t / sg[π_t] (GSPO-token); all
    `(bs, response_length)`.

    log s is the mean log-ratio of the sequence, capped at 10. The paper aggregates by
    `seq-mean-token-mean`.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    sequence = (difference.sum(dim=-1, keepdim=True) / lengths).detach()
    token_part = difference - difference.detach()
    ratio = torch.exp((sequence + token_part).clamp(max=MAX_LOG_SEQUENCE_RATIO))
    loss, stats = clipped_surrogate(
        ratio, under_mask(advantages, loss_mask), clip_ratio_low, clip_ratio_high, None
    )

    return loss, stats | {"ppo_kl": -difference.detach()}


@register_policy_loss("gmpo", every_row=True)
def compute_gmpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """−A · (Π r_t)^(1/n), the sequence's loss, on each of its n tokens; all
    `(bs, response_length)`.

    Log-ratios are clipped per token only at −ε_low if A < 0 and at ε_high if A > 0, so a ratio may
    overflow if A < 0; A is the sequence's mean advantage. The paper's mean over sequences is
    `seq-mean-token-mean`, and counts every row, even without tokens, as verl, siiRL and TRL do.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask).to(difference.dtype)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    pessimistic = torch.where(
        advantages > 0, difference.clamp(max=clip_ratio_high), difference.clamp(min=-clip_ratio_low)
    )
    pessimistic = torch.where(advantages == 0, torch.zeros_like(pessimistic), pessimistic)
    ratio = (pessimistic.sum(dim=-1, keepdim=True) / lengths).exp()
    loss = -(advantages.sum(dim=-1, keepdim=True) / lengths) * ratio
    stats = {
        "pg_clipfrac": as_stat((advantages > 0) & (difference > clip_ratio_high), difference),
        "pg_clipfrac_lower": as_stat((advantages < 0) & (difference < -clip_ratio_low), difference),
        "ppo_kl": -difference.detach(),
    }

    return loss.expand_as(difference), stats


EPSILON = 1e-8


@register_policy_loss("dppo_tv", check=check_dual_clip)
def compute_dppo_tv_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """−sg[min(r, c)]·A·logπ per token, 0 where π − π_old is above `clip_ratio_high` (A > 0) or
    below −`clip_ratio_low`.

    All `(bs, response_length)`. `clip_ratio_c` None leaves the weight untruncated; the paper
    recommends a large value (section 5.4).
    """
    policy, old = _probabilities(log_probs, old_log_probs, loss_mask)
    moved = policy - old
    inside = torch.where(
        under_mask(advantages, loss_mask) > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low
    )
    return _masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)


@register_policy_loss("dppo_kl", check=check_dual_clip)
def compute_dppo_kl_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """As `dppo_tv`, but 0 where a token moved in A's direction by a binary KL(old ‖ policy) above
    the bound.

    Binary: over the distributions {this token, any other}.
    """
    policy, old = _probabilities(log_probs, old_log_probs, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    others = torch.log((1.0 - old + EPSILON) / (1.0 - policy + EPSILON))
    divergence = -old * difference + (1.0 - old) * others
    rises = (divergence <= clip_ratio_high) | (policy <= old)
    falls = (divergence <= clip_ratio_low) | (policy >= old)
    inside = torch.where(under_mask(advantages, loss_mask) > 0, rises, falls)

    return _masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)


def _probabilities(
    log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(policy, old policy) of each token without gradient, at most 1 despite rounding; 1 outside
    the mask."""
    policy = under_mask(log_probs.detach(), loss_mask).clamp(max=0.0).exp()
    return policy, policy if old_log_probs is None else under_mask(old_log_probs, loss_mask).clamp(
        max=0.0
    ).exp()


def _masked_gradient(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None,
    inside: Tensor,
    clip_ratio_c: float | None,
) -> tuple[Tensor, Stats]:
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    weight = as_stat(inside, ratio) * (
        ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c)
    )
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    stats = {"pg_clipfrac": as_stat(~inside, ratio), "ppo_kl": -difference}
    if clip_ratio_c is not None:
        stats["pg_clipfrac_lower"] = as_stat(inside & (ratio > clip_ratio_c), ratio)
    return loss, stats
