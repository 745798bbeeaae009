"""Clip-Cov and KL-Cov: special treatment of the tokens that lower the entropy most ("The entropy
mechanism of RL", Cui et al. 2025, arXiv:2505.22617), by the covariance of log-prob and advantage.

Clip-Cov gives a few of these tokens no gradient; KL-Cov pulls them to the old policy. Options are
as in verl and the authors' code (PRIME-RL/Entropy-Mechanism-of-RL). Those select tokens in each
micro-batch with the current policy; here they are selected once per step with the policy before its
first update, independent of the number of ranks.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, clipped_surrogate
from distflow.algorithms.masked_reductions import (
    Reduce,
    as_stat,
    global_sum,
    log_ratio,
    masked_mean,
    under_mask,
)
from distflow.algorithms.registry import register_policy_loss
from distflow.graph.fields import register_field
from distflow.graph.node_spec import node

register_field(
    "selected_tokens",
    doc="1 on tokens that the policy loss treats specially, selected before the update",
)


def token_covariance(
    advantages: Tensor, old_log_probs: Tensor, loss_mask: Tensor, reduce: Reduce | None = None
) -> Tensor:
    """(A − mean A)·(logπ_old − mean logπ_old) of each token, float64, 0 outside the mask.

    All `(bs, response_length)`; the means are over the tokens of the batch of all ranks.
    """
    parts = [(x.double() - masked_mean(x, loss_mask, reduce)) for x in (advantages, old_log_probs)]
    return under_mask(parts[0], loss_mask) * under_mask(parts[1], loss_mask)


def check_share(name: str, share: float) -> None:
    """Raises ValueError if the share is outside its range."""
    if not 0 < share <= 1:
        raise ValueError(f"{name} is a share of the tokens, above 0 and at most 1, not {share}")


def num_selected(share: float, loss_mask: Tensor, reduce: Reduce | None = None) -> int:
    """The share as a number of tokens over all ranks, rounded down, at least one."""
    tokens = global_sum((loss_mask > 0).sum().double(), reduce)
    return max(int(share * float(tokens)), 1)


def token_draws(uid: Sequence[str], loss_mask: Tensor) -> Tensor:
    """A random number for each token, float64 `(bs, response_length)`, from its sample's uid and
    position; only their order matters."""
    length = loss_mask.shape[-1]
    keys = [
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        for name in uid
    ]

    rows = [np.random.Philox(key=key).random_raw(length) for key in keys]
    if rows:
        bits = np.stack(rows)
    else:
        bits = np.zeros((0, length), dtype=np.uint64)

    return torch.from_numpy(bits.astype(np.float64)).to(loss_mask.device)


def largest(
    values: Tensor, ties: Tensor, among: Tensor, count: int, reduce: Reduce | None = None
) -> Tensor:
    """bool: the `count` largest values of all ranks under `among` (all of them if there are no
    more).

    Among equal values at the threshold, larger `ties` win. values, ties: float64.
    """
    cut = _cut(values, among, count, reduce)
    above = among & (_ordered(values) > cut)
    at = among & (_ordered(values) == cut)
    left = count - int(global_sum(above.sum().double(), reduce))
    return above | (at & (_ordered(ties) >= _cut(ties, at, left, reduce)))


def _cut(values: Tensor, among: Tensor, count: int, reduce: Reduce | None) -> int:
    """The `count`-th largest of the values of all ranks, by bisection over their bits: ranks share
    counts only."""
    bits = _ordered(values)
    low = -(2**63)
    high = 2**63 - 1
    while low < high:
        middle = (low + high + 1) // 2
        if float(global_sum((among & (bits >= middle)).sum().double(), reduce)) >= count:
            low = middle
        else:
            high = middle - 1

    return low


def _ordered(values: Tensor) -> Tensor:
    """float64 as int64 in the same order."""
    bits = (values + 0.0).contiguous().view(torch.int64)  # turns −0 into 0
    return bits ^ ((bits >> 63) & (2**63 - 1))


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
