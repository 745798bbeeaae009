"""Sums, means and whitening under a mask, over one rank or all. What stands outside the mask is never read."""

from typing import Protocol

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


class Reduce(Protocol):
    """Sums and maxima over the ranks that share a global batch."""

    def sum(self, value: Tensor) -> Tensor: ...

    def max(self, value: Tensor) -> Tensor: ...


def under_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` > 0, else 0; NaN and inf outside the mask reach neither the value nor the gradient."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def global_sum(value: Tensor, reduce: Reduce | None) -> Tensor:
    """The sum over all ranks; `value` itself where there is one."""
    return value if reduce is None else reduce.sum(value)


def masked_mean(values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Mean over the tokens under the mask, in float64, a scalar; 0 where there is none."""
    return _moments(values, mask, reduce)[0]


def masked_var(values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Unbiased variance over the tokens under the mask, in float64, a scalar; 0 with fewer than two tokens."""
    return _moments(values, mask, reduce)[1]


def masked_whiten(values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """(values − mean) · rsqrt(variance + 1e-8) under the mask, 0 outside, over the batch of all ranks.

    values, mask: `(bs, length)`. The variance is unbiased. With fewer than two tokens the values are only centred.
    """
    inside = under_mask(values.double(), mask)
    mean, variance, count = _moments(inside, mask, reduce)
    scale = torch.where(count > 1, torch.rsqrt(variance + WHITEN_EPSILON), torch.ones_like(variance))
    return under_mask((inside - mean) * scale, mask)


def _moments(values: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    # Two passes: the sum of squares about the mean keeps its digits where E[x²] − E[x]² would cancel them.
    inside = under_mask(values.double(), mask)
    total, count = global_sum(torch.stack([inside.sum(), (mask > 0).sum().double()]), reduce).unbind()
    mean = total / count.clamp(min=1)
    squares = global_sum(under_mask((inside - mean) ** 2, mask).sum(), reduce)
    return mean, squares / (count - 1).clamp(min=1), count
