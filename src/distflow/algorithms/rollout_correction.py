"""Corrections for a rollout policy that differs from the trained one.

- Importance weights per token, truncated ("Your efficient RL framework secretly brings you
  off-policy RL training", Yao et al. 2025) or masked outside a band (IcePop, Ling team,
  arXiv:2510.18855).
- Rejection masks: tokens or sequences with too large a difference are excluded from the loss, as in
  verl's `rollout_rs`. The masks of other systems by token, sequence and geometric mean are
  `token_k1`, `seq_sum_k1` and `seq_mean_k1`.
- Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556; `off_policy_mask_threshold` of TRL's
  GRPOTrainer).
- Proximal log-probs without a forward pass, for decoupled PPO on stale rollouts: the log-prob is
  assumed to move evenly from version to version (AReaL's `prox_logp_method=loglinear`, its
  `docs/algorithms/prox_approx.md`). AReaL 1.0 is one version off: it takes the engine's version,
  still that before the update, for the current policy's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import (
    MAX_LOG_RATIO,
    Reduce,
    global_sum,
    masked_mean,
    raw_log_ratio,
    under_mask,
)
from distflow.config.keys.algorithm import Bounds
from distflow.graph.fields import register_field

register_field(
    "rollout_is_weights",
    doc="importance weight of each token: trainer over rollout policy, corrected",
)

_SMALLEST_MEAN = 1e-8

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Correction:
    """Options of the weights, by verl's names. rollout_is: a weight is the ratio of each token, the
    product over a sequence, or its geometric mean per token. rollout_is_threshold: weights above
    this number are lowered to it; with (lower, upper), weights outside the band are 0 (IcePop)."""

    rollout_is: Level
    rollout_is_threshold: float | tuple[float, float] = 2.0

    def weighted_mass(self, trainer: Tensor, sampler: Tensor) -> Tensor:
        """sampler · w, with the weight w of a token that has these probabilities."""
        threshold = self.rollout_is_threshold
        if not isinstance(threshold, tuple):
            return torch.minimum(trainer, threshold * sampler)

        lower, upper = threshold
        is_inside = (trainer >= lower * sampler) & (trainer <= upper * sampler)
        return torch.where(is_inside, trainer, torch.zeros_like(trainer))

    def weights(
        self, old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(weights before the correction, weights after it), float64 `(bs, response_length)`, 0
        outside the mask.

        A row is a whole sequence. Without gradient.
        """
        threshold = self.rollout_is_threshold
        log_ratio = raw_log_ratio(
            old_log_probs.detach(), rollout_log_probs.detach(), loss_mask
        ).double()
        if self.rollout_is != "token":
            total = log_ratio.sum(dim=-1, keepdim=True)
            if self.rollout_is == "geometric":
                total = total / (loss_mask > 0).sum(dim=-1, keepdim=True)
            log_ratio = total.expand_as(log_ratio)

        raw = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if isinstance(threshold, tuple):
            lower, upper = threshold
            weights = torch.where((raw <= upper) & (raw >= lower), raw, torch.zeros_like(raw))
        else:
            weights = raw.clamp(max=threshold)

        return under_mask(raw, loss_mask), under_mask(weights, loss_mask)


def compute_rollout_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    correction: Correction,
    *,
    batch_normalize: bool = False,
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(weights float32 `(bs, response_length)`, statistics): π_trainer / π_rollout of the tokens
    under the mask.

    batch_normalize: divide the weights, after the threshold, by their mean over the global batch,
    per token or per sequence according to `rollout_is` (verl's `rollout_is_batch_normalize`); a
    mean of 0 changes nothing. Weights have no gradient and are 0 outside the mask. Statistics cover
    the global batch: mean and maximum before the correction, the share of weights that it changed,
    the effective sample size after it (0 if nothing is left), and the mean of the normalisation
    (`rollout_is_batch_norm_factor`).
    """
    raw, weights = correction.weights(old_log_probs, rollout_log_probs, loss_mask)
    level = correction.rollout_is

    stats = {
        "rollout_is_mean": float(masked_mean(raw, loss_mask, reduce)),
        "rollout_is_max": _global_max(raw, reduce),
        "rollout_is_corrected_frac": float(
            masked_mean((weights != raw).double(), loss_mask, reduce)
        ),
        "rollout_is_eff_sample_size": float(
            effective_sample_size(*_draws(weights, loss_mask, level), reduce)
        ),
    }
    if batch_normalize:
        factor = float(masked_mean(*_draws(weights, loss_mask, level), reduce))
        weights = weights / factor if factor > _SMALLEST_MEAN else weights
        if factor > _SMALLEST_MEAN:
            stats["rollout_is_batch_norm_factor"] = factor
        else:
            stats["rollout_is_batch_norm_factor"] = 1.0

    return weights.float(), stats


def effective_sample_size(weights: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """(Σw)² / (n · Σw²) in 0..1 over the entries under the mask, a scalar; 0 where all weights are
    0. weights: float64."""
    inside = under_mask(weights, mask)
    sums = torch.stack([inside.sum(), inside.square().sum(), (mask > 0).sum().double()])
    total, squares, count = global_sum(sums, reduce).unbind()
    size = total.square() / (squares * count)
    return torch.where(squares * count > 0, size, torch.zeros_like(size))


def mismatch_statistics(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, reduce: Reduce | None = None
) -> dict[str, float]:
    """The difference between the rollout policy and the trainer's, over the tokens of the global
    batch.

    `mean_abs` and `max_abs` of the log-probs' difference, `k3` (estimate of KL(rollout ‖ trainer)),
    and `ess` of the uncorrected token weights. log-probs, mask: of any one shape.
    """
    difference = raw_log_ratio(trainer_log_probs, rollout_log_probs, mask).double()
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    size = difference.abs()

    # the difference is 0 and the weight 1 outside the mask
    weights = log_ratio.exp()
    inside = mask > 0
    counted = under_mask(weights, inside)
    sums = [
        size.sum(),
        (weights - log_ratio - 1.0).sum(),
        counted.sum(),
        counted.square().sum(),
        inside.sum().double(),
    ]
    gaps, k3, total, squares, count = global_sum(torch.stack(sums), reduce).tolist()

    return {
        "mean_abs": gaps / max(count, 1.0),
        "max_abs": _global_max(size, reduce),
        "k3": k3 / max(count, 1.0),
        "ess": total**2 / (squares * count) if squares * count > 0 else 0.0,
    }


def _draws(weights: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """(weights, which of them count): one per token, or per sequence, since a long sequence is a
    single draw."""
    if level == "token":
        return weights, mask
    per_row = weights.sum(dim=-1) / (mask > 0).sum(dim=-1)
    return per_row, (mask > 0).any(dim=-1)


def _global_max(values: Tensor, reduce: Reduce | None) -> float:
    largest = values.max() if values.numel() else values.new_zeros(())
    return float(largest if reduce is None else reduce.max(largest))


def compute_rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    rollout_rs: Sequence[str],
    bounds: Sequence[Bounds],
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss_mask without the rejected tokens, float32 `(bs, response_length)`; statistics over the
    global batch).

    rollout_rs: the divergences: `token_`, `seq_sum_` and `seq_mean_` of k1, k2, k3, and `seq_max_`
    of k2, k3; a token must pass all. With d = log π_trainer − log π_rollout within ±20: k1 = −d, k2
    = d²/2, k3 = e^d − 1 − d. bounds: (lower, upper) of each, inclusive: for k1 as ratios π_rollout
    / π_trainer, with 1 / upper as the default lower bound; for k2 and k3 only the upper one.
    Statistics: the mean of each and the share of tokens that it rejects (`NAME_mean`,
    `NAME_masked`), and the shares of tokens and of sequences (whole or in part) that are rejected.
    """
    difference = raw_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(), loss_mask)
    log_ratio = difference.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inside = loss_mask > 0

    kept = inside
    statistics = {}
    for name, (lower, upper) in zip(rollout_rs, bounds, strict=True):
        measured = _measure(name, log_ratio, inside)
        passes = measured <= (math.log(upper) if name.endswith("k1") else upper)
        if name.endswith("k1"):
            passes = passes & (measured >= (-math.log(upper) if lower is None else math.log(lower)))
        kept = kept & passes
        statistics[f"{name}_mean"] = float(masked_mean(measured, loss_mask, reduce))
        statistics[f"{name}_masked"] = float(masked_mean((~passes).double(), loss_mask, reduce))

    statistics["masked"] = float(masked_mean((~kept).double(), loss_mask, reduce))
    counts = torch.stack([rows.any(dim=-1).sum().double() for rows in (inside & ~kept, inside)])
    num_masked, num_rows = global_sum(counts, reduce).unbind()
    statistics["seq_masked"] = float(num_masked / num_rows.clamp(min=1))

    return torch.where(kept, loss_mask, torch.zeros_like(loss_mask)).float(), statistics


def _measure(name: str, log_ratio: Tensor, inside: Tensor) -> Tensor:
    """The divergence of each token, or that of its sequence; `(bs, response_length)`."""
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
        total = total / inside.sum(dim=-1, keepdim=True)
    return total.expand_as(divergence)


def off_policy_sequence_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    threshold: float,
) -> Tensor:
    """0 on tokens with A < 0 in sequences whose mean of log π_rollout − log π exceeds `threshold`,
    else 1.

    All `(bs, response_length)`; π is the current policy, so a sequence may become masked during a
    step. Carries no gradient. The mean is over the tokens under the mask, in nats a token. Masked
    tokens stay in the denominators.
    """
    current = under_mask(log_probs.detach(), loss_mask)
    gap = (under_mask(rollout_log_probs, loss_mask) - current).double()
    mean = gap.sum(dim=-1, keepdim=True) / (loss_mask > 0).sum(dim=-1, keepdim=True)
    kept = (under_mask(advantages, loss_mask) >= 0) | (mean <= threshold)
    return kept.to(log_probs.dtype)


register_field(
    "prox_alpha",
    doc=(
        "position of the proximal policy between the one that generated the token (0) and the "
        "trained"
    ),
)


def proximal_position(versions: Tensor, step: int) -> Tensor:
    """α = (v_prox − v) / (v_θ − v) of each token, in [0, 1), float32 of the same shape.

    versions: v, the weight version of the token. step: v_prox, the trainer's version before the
    update; after it v_θ = step + 1. α is 0 for tokens that are not the policy's, and for those of
    the proximal policy itself.
    """
    behind = (
        torch.where(versions >= 0, step - versions, torch.zeros_like(versions)).clamp(min=0).float()
    )
    return behind / (behind + 1.0)


def interpolate(log_probs: Tensor, old_log_probs: Tensor, alpha: Tensor) -> Tensor:
    """log π_prox ≈ log π_old + α (log π_θ − log π_old), without gradient; all
    `(bs, response_length)`."""
    return old_log_probs + alpha * (log_probs.detach() - old_log_probs)
