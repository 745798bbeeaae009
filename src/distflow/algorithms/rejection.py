"""Rejection masks: tokens or sequences on which trainer and rollout policy differ too much are left out of the loss.

As verl's rollout correction (`rollout_rs`). The masks by token, by sequence and by geometric mean of other systems are
its `token_k1`, `seq_sum_k1` and `seq_mean_k1`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import MAX_LOG_RATIO
from distflow.algorithms.masking import Reduce, global_sum, masked_mean, under_mask
from distflow.config.names import ROLLOUT_RS

Bounds = tuple[float | None, float]


def compute_rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    rollout_rs: Sequence[str],
    bounds: Sequence[Bounds],
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss_mask less what is rejected, float32 `(bs, response_length)`; statistics over the global batch).

    rollout_rs: what is measured: `token_`, `seq_sum_` and `seq_mean_` of k1, k2, k3, and `seq_max_` of k2, k3; a token
    must pass all. With d = log π_trainer − log π_rollout within ±20: k1 = −d, k2 = d²/2, k3 = e^d − 1 − d.
    bounds: (lower, upper) of each, inclusive: of k1 as ratios π_rollout / π_trainer, no lower one meaning 1 / upper;
    of k2 and k3 the upper one alone. Statistics: for each the mean of what is measured and the share of tokens that it
    rejects (`NAME_mean`, `NAME_masked`), and the shares of tokens and of sequences (whole or in part) that all reject.
    Raises ValueError for an unknown name or bounds without sense.
    """
    check_rejection(rollout_rs, bounds)
    difference = under_mask(old_log_probs.detach(), loss_mask) - under_mask(rollout_log_probs.detach(), loss_mask)
    log_ratio = difference.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inside = loss_mask > 0
    kept, statistics = inside, {}
    for name, (lower, upper) in zip(rollout_rs, bounds, strict=True):
        measured = _measure(name, log_ratio, inside)
        passes = measured <= (math.log(upper) if name.endswith("k1") else upper)
        if name.endswith("k1"):
            passes = passes & (measured >= (-math.log(upper) if lower is None else math.log(lower)))
        kept = kept & passes
        statistics[f"{name}_mean"] = float(masked_mean(measured, loss_mask, reduce))
        statistics[f"{name}_masked"] = float(masked_mean((~passes).double(), loss_mask, reduce))
    statistics["masked"] = float(masked_mean((~kept).double(), loss_mask, reduce))
    statistics["seq_masked"] = _share_of_rows((inside & ~kept).any(dim=-1), inside.any(dim=-1), reduce)
    return torch.where(kept, loss_mask, torch.zeros_like(loss_mask)).float(), statistics


def check_rejection(rollout_rs: Sequence[str], bounds: Sequence[Bounds]) -> None:
    """Raises ValueError for an unknown name, or where not every one has bounds with something between them."""
    for name in rollout_rs:
        if name not in ROLLOUT_RS:
            raise ValueError(f"rollout_rs '{name}' is unknown; choose from {', '.join(ROLLOUT_RS)}")
    if len(rollout_rs) != len(bounds):
        raise ValueError(f"rollout_rs has {len(rollout_rs)} entries and its bounds {len(bounds)}; give one for each")
    for name, (lower, upper) in zip(rollout_rs, bounds, strict=True):
        if not upper > 0 or (lower is not None and not 0 < lower <= upper):
            raise ValueError(f"the bounds of {name} must be positive, the lower one first, not {lower} and {upper}")
        if name.endswith("k1") and lower is None and upper < 1:
            raise ValueError(f"nothing lies between 1/{upper:g} and {upper:g}, the bounds of {name}")
        if lower is not None and not name.endswith("k1"):
            raise ValueError(f"{name} is never negative and has no lower bound; give {upper:g} alone")


def _measure(name: str, log_ratio: Tensor, inside: Tensor) -> Tensor:
    """The divergence of each token, or that of its sequence on each of its tokens; `(bs, response_length)`."""
    level, _, estimator = name.rpartition("_")
    divergence = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio.square(),
        "k3": log_ratio.exp() - 1.0 - log_ratio,
    }[estimator]
    divergence = under_mask(divergence, inside)
    if level == "token" or not divergence.shape[-1]:
        return divergence
    if level == "seq_max":
        return divergence.amax(dim=-1, keepdim=True).expand_as(divergence)
    total = divergence.sum(dim=-1, keepdim=True)
    if level == "seq_mean":
        total = total / inside.sum(dim=-1, keepdim=True).clamp(min=1)
    return total.expand_as(divergence)


def _share_of_rows(hit: Tensor, rows: Tensor, reduce: Reduce | None) -> float:
    counts = global_sum(torch.stack([hit.sum().double(), rows.sum().double()]), reduce)
    return float(counts[0] / counts[1].clamp(min=1))
