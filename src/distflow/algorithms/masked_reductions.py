"""Log-ratios, sums, means and whitening under a mask, over one rank or all, and aggregation of
per-token losses. Values outside the mask are never read.

A mini-batch is one optimizer step. Its counts are first summed over all micro-batches and ranks;
each part then weights its own tokens by these counts, so that losses and gradients add up exactly
to those of the whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distflow.builtin_names import LOSS_AGG_MODES

WHITEN_EPSILON = 1e-8
MAX_LOG_RATIO = 20.0


class Reduce(Protocol):
    """Sums and maxima over the ranks that share a global batch."""

    def sum(self, value: Tensor) -> Tensor: ...

    def max(self, value: Tensor) -> Tensor: ...


def under_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` > 0, else 0; NaN and inf outside the mask reach neither the value nor
    the gradient."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def log_ratio(log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor) -> Tensor:
    """log_probs − old_log_probs clamped to ±20, 0 outside the mask, `(bs, response_length)`.

    Without old log-probs it is taken against the detached log-probs: 0, with the gradient of
    log_probs.
    """
    return raw_log_ratio(log_probs, old_log_probs, loss_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def raw_log_ratio(log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor) -> Tensor:
    """As `log_ratio`, unclamped."""
    current = under_mask(log_probs, loss_mask)
    if old_log_probs is None:
        old = current.detach()
    else:
        old = under_mask(old_log_probs, loss_mask)
    return current - old


def as_stat(flags: Tensor, like: Tensor) -> Tensor:
    """A per-token condition as numbers, for averaging."""
    return flags.to(like.dtype)


def global_sum(value: Tensor, reduce: Reduce | None) -> Tensor:
    """The sum over all ranks; `value` itself on a single rank."""
    return value if reduce is None else reduce.sum(value)


def masked_mean(values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Mean over the tokens under the mask, a float64 scalar; 0 without tokens."""
    return _mean(under_mask(values.double(), mask), mask, reduce)[0]


def masked_var(values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Unbiased variance over the tokens under the mask, a float64 scalar; 0 with fewer than two
    tokens."""
    return _centred(values, mask, reduce)[1]


def masked_whiten(values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """(values − mean) · rsqrt(variance + 1e-8) under the mask, 0 outside, over the batch of all
    ranks.

    values, mask: `(bs, length)`. The variance is unbiased. With fewer than two tokens the values
    are only centred.
    """
    centred, variance, count = _centred(values, mask, reduce)
    return centred * torch.where(
        count > 1, torch.rsqrt(variance + WHITEN_EPSILON), torch.ones_like(variance)
    )


def _mean(inside: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """(mean, number of tokens)."""
    total, count = global_sum(
        torch.stack([inside.sum(), (mask > 0).sum().double()]), reduce
    ).unbind()
    return total / count.clamp(min=1), count


def _centred(values: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """(values − mean, 0 outside the mask; variance; number of tokens)."""
    centred = under_mask(values.double(), mask)

    # differences of large values are exact, their mean is only up to its rounding
    for _ in range(2):
        mean, count = _mean(centred, mask, reduce)
        centred = under_mask(centred - mean, mask)

    # The sum of squares about the mean keeps the digits that E[x²] − E[x]² would cancel.
    squares = global_sum(centred.square().sum(), reduce)
    return centred, squares / (count - 1).clamp(min=1), count


def check_loss_agg_mode(mode: str) -> None:
    """Raises ValueError if there is no such mode."""
    if mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode '{mode}' is unknown; choose one of {', '.join(LOSS_AGG_MODES)}"
        )


def loss_counts(loss_mask: Tensor) -> dict[str, float]:
    """Tokens under the mask, sequences with at least one, and all rows; they add over micro-batches
    and ranks.

    loss_mask: `(bs, response_length)`.
    """
    mask = loss_mask > 0
    return {
        "tokens": float(mask.sum()),
        "sequences": float(mask.any(dim=-1).sum()),
        "rows": float(len(mask)),
    }


def token_weights(
    loss_mask: Tensor,
    mode: str,
    counts: Mapping[str, float],
    scale: float | None = None,
    *,
    every_row: bool = False,
) -> Tensor:
    """Each token's weight, float64 `(bs, response_length)`: the loss is Σ weight · per-token loss.

    counts: `loss_counts` of the whole mini-batch. scale: divisor of `seq-mean-token-sum-norm`, in
    tokens; by default the length of this mask, which differs between micro-batches. Rows without
    tokens are excluded from sequence means, unless `every_row`; an empty mini-batch has weight 0.
    Raises ValueError for an unknown mode.
    """
    check_loss_agg_mode(mode)
    mask = (loss_mask > 0).double()
    if mode == "token-mean":
        return mask / max(counts["tokens"], 1.0)

    per_sequence = mask / max(counts["rows" if every_row else "sequences"], 1.0)
    if mode == "seq-mean-token-sum":
        return per_sequence
    if mode == "seq-mean-token-mean":
        return per_sequence / mask.sum(dim=-1, keepdim=True).clamp(min=1)

    return per_sequence / (scale if scale is not None else max(loss_mask.shape[-1], 1))


def weighted_sum(loss_mat: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · loss, a scalar; losses of weightless tokens are never read."""
    return (under_mask(loss_mat, weights) * weights.to(loss_mat.dtype)).sum()


@dataclass
class BoundCounts:
    """The mini-batch that `agg_loss` aggregates over, and whether it was called."""

    counts: Mapping[str, float]
    scale: float | None
    used: bool = False


_bound: ContextVar[BoundCounts | None] = ContextVar("distflow_loss_counts", default=None)


@contextmanager
def bind_counts(counts: Mapping[str, float], scale: float | None) -> Iterator[BoundCounts]:
    """Within this context, `agg_loss` returns the share of a mini-batch with these counts."""
    bound = BoundCounts(counts, scale)
    token = _bound.set(bound)
    try:
        yield bound
    finally:
        _bound.reset(token)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregate per-token losses `(bs, response_length)` into a scalar.

    Inside a policy loss the result is this micro-batch's share of the mini-batch; elsewhere
    `loss_mat` is the whole batch. A batch without tokens gives 0 with zero gradient. Raises
    ValueError for an unknown mode.
    """
    bound = _bound.get() or BoundCounts(loss_counts(loss_mask), None)
    bound.used = True

    if loss_scale_factor is None:
        scale = bound.scale
    else:
        scale = loss_scale_factor

    return weighted_sum(loss_mat, token_weights(loss_mask, loss_agg_mode, bound.counts, scale))


def check_scale(mode: str, scale: float | None) -> None:
    """Raises ValueError if the mode needs a scale that does not depend on how the mini-batch is
    split."""
    check_loss_agg_mode(mode)
    if scale is not None and not scale > 0:
        raise ValueError(f"loss_scale_factor must be positive, not {scale}")
    if mode == "seq-mean-token-sum-norm" and scale is None:
        raise ValueError(
            "loss_agg_mode 'seq-mean-token-sum-norm' needs loss_scale_factor (the longest response)"
        )
