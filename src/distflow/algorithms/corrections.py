"""Corrections for a rollout policy that is not the trainer's: importance weights, truncated or masked.

Truncated weights per token: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al. 2025).
A band outside of which tokens do not count: IcePop (Ling team, arXiv:2510.18855).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.masking import Reduce, global_sum, masked_mean, under_mask
from distflow.graph.fields import register_field

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")

register_field("rollout_is_weights", doc="importance weight of each token: trainer over rollout policy, corrected")

_SMALLEST_MEAN = 1e-8

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class Correction:
    """How weights are made: see `compute_rollout_weights`."""

    level: Level
    mode: Mode = "truncate"
    cap: float = 2.0
    floor: float | None = None

    def weights(self, old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(weights before the correction, weights after it), float64 `(bs, response_length)`, 0 outside the mask.

        A row is a whole sequence. Without gradient. Raises ValueError as `compute_rollout_weights`.
        """
        _check(self.level, self.mode, self.cap, self.floor)
        raw = _raw_weights(old_log_probs.detach(), rollout_log_probs.detach(), loss_mask, self.level)
        weights = raw.clamp(max=self.cap)
        if self.mode == "mask":
            inside = (raw <= self.cap) & (raw >= (0.0 if self.floor is None else self.floor))
            weights = torch.where(inside, raw, torch.zeros_like(raw))
        return under_mask(raw, loss_mask), under_mask(weights, loss_mask)


def compute_rollout_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    level: Level,
    mode: Mode = "truncate",
    cap: float = 2.0,
    floor: float | None = None,
    batch_normalize: bool = False,
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(weights float32 `(bs, response_length)`, statistics): π_trainer / π_rollout of the tokens under the mask.

    level: the ratio of each token, the product over a sequence, or its geometric mean per token. mode: `truncate`
    lowers weights above `cap` to it; `mask` sets weights above `cap` or below `floor` to 0. batch_normalize: then
    divides them by their mean over the global batch, of tokens or of sequences as `level` counts (verl's
    `rollout_is_batch_normalize`); where that is 0 they stay. Weights carry no gradient and are 0 outside the mask.
    Statistics are over the global batch: mean and maximum before the correction, the share that it changed, the
    effective sample size after it (0 where nothing is left), and the mean that it was divided by (`batch_norm_factor`).
    Raises ValueError for an unknown level or mode, or bounds that make no sense.
    """
    raw, weights = Correction(level, mode, cap, floor).weights(old_log_probs, rollout_log_probs, loss_mask)
    stats = {
        "weight_mean": float(masked_mean(raw, loss_mask, reduce)),
        "weight_max": _global_max(raw, reduce),
        "corrected_fraction": float(masked_mean((weights != raw).double(), loss_mask, reduce)),
        "ess": float(_sample_size(weights, loss_mask, level, reduce)),
    }
    if batch_normalize:
        factor = float(_mean_weight(weights, loss_mask, level, reduce))
        weights = weights / factor if factor > _SMALLEST_MEAN else weights
        stats["batch_norm_factor"] = factor if factor > _SMALLEST_MEAN else 1.0
    return weights.float(), stats


def effective_sample_size(weights: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """(Σw)² / (n · Σw²) in 0..1 over the entries under the mask, a float64 scalar; 0 where all weights are 0."""
    inside = under_mask(weights.double(), mask)
    sums = torch.stack([inside.sum(), inside.square().sum(), (mask > 0).sum().double()])
    total, squares, count = global_sum(sums, reduce).unbind()
    size = total.square() / (squares * count)
    return torch.where(squares * count > 0, size, torch.zeros_like(size))


def mismatch_statistics(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, reduce: Reduce | None = None
) -> dict[str, float]:
    """How far the rollout policy is from the trainer's, over the tokens of the global batch.

    `mean_abs` and `max_abs` of the log-probs' difference, `k3` (estimate of KL(rollout ‖ trainer)), and `ess` of the
    uncorrected token weights. log-probs, mask: `(bs, response_length)`.
    """
    difference = (under_mask(trainer_log_probs, mask) - under_mask(rollout_log_probs, mask)).double()
    log_ratio = difference.clamp(-20.0, 20.0)
    return {
        "mean_abs": float(masked_mean(difference.abs(), mask, reduce)),
        "max_abs": _global_max(difference.abs(), reduce),
        "k3": float(masked_mean(log_ratio.exp() - log_ratio - 1.0, mask, reduce)),
        "ess": float(effective_sample_size(log_ratio.exp(), mask, reduce)),
    }


def _raw_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: str) -> Tensor:
    log_ratio = (under_mask(old_log_probs, mask) - under_mask(rollout_log_probs, mask)).double()
    if level != "token":
        total = log_ratio.sum(dim=-1, keepdim=True)
        if level == "geometric":
            total = total / (mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = total.expand_as(log_ratio)
    return log_ratio.clamp(-20.0, 20.0).exp()


def _sample_size(weights: Tensor, mask: Tensor, level: str, reduce: Reduce | None) -> Tensor:
    return effective_sample_size(*_draws(weights, mask, level), reduce)


def _mean_weight(weights: Tensor, mask: Tensor, level: str, reduce: Reduce | None) -> Tensor:
    return masked_mean(*_draws(weights, mask, level), reduce)


def _draws(weights: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """(weights, which of them count): one a token, or one a sequence: a long sequence is still one draw."""
    if level == "token":
        return weights, mask
    per_row = weights.sum(dim=-1) / (mask > 0).sum(dim=-1).clamp(min=1)
    return per_row, (mask > 0).any(dim=-1)


def _global_max(values: Tensor, reduce: Reduce | None) -> float:
    largest = values.max() if values.numel() else values.new_zeros(())
    return float(largest if reduce is None else reduce.max(largest))


def _check(level: str, mode: str, cap: float, floor: float | None) -> None:
    if level not in LEVELS:
        raise ValueError(f"rollout_correction.level '{level}' is unknown; choose one of {', '.join(LEVELS)}")
    if mode not in MODES:
        raise ValueError(f"rollout_correction.mode '{mode}' is unknown; choose one of {', '.join(MODES)}")
    if not cap > 0:
        raise ValueError(f"rollout_correction.cap must be positive, not {cap}")
    if floor is not None and mode != "mask":
        raise ValueError("rollout_correction.floor is the lower end of a band: it needs rollout_correction.mode=mask")
    if floor is not None and not 0 <= floor < cap:
        raise ValueError(f"rollout_correction.floor must lie in 0..cap ({cap}), not {floor}")
