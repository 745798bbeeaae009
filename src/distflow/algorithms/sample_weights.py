"""Masks and weights of samples by length and difficulty.

They are those of alibaba/ROLL (`get_sample_level_mask`, `compute_sample_weights`), except that
difficulty is measured on the group's own responses, invalid samples never count, and bounds and
means are over the batch of all ranks.
"""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import Groups
from distflow.algorithms.group_filter import Band
from distflow.algorithms.masked_reductions import Reduce, global_sum, under_mask


def share_right(accuracy: Tensor, group_index: Tensor, valid: Tensor) -> Tensor:
    """Mean accuracy of the group's valid samples, float64 `(bs,)`; 0 in a group without one. All
    `(bs,)`."""
    groups = Groups(group_index, valid)
    return groups.sum(accuracy.double()) / groups.size.clamp(min=1)


def is_within(share: Tensor, band: Band) -> Tensor:
    """bool `(bs,)`: above the low end and below the high one."""
    return (share > band[0]) & (share < band[1])


def difficulty_weights(share: Tensor, band: Band) -> Tensor:
    """Weights from the band's first value if all samples are right to its second if none is,
    `(bs,)`."""
    return band[0] + (band[1] - band[0]) * (1.0 - share)


def length_weights(
    lengths: Tensor, valid: Tensor, band: Band, reduce: Reduce | None = None
) -> Tensor:
    """Weights from the band's first value for the batch's shortest valid response to its second for
    the longest; the first if all lengths are equal. lengths, valid: `(bs,)`."""
    lengths = lengths.double()
    known = lengths[valid.bool()]

    ends = torch.full((2,), -torch.inf, dtype=torch.float64)
    if known.numel():
        # of the shortest length the sign is turned, so that the ranks take two maxima
        ends = torch.stack([-known.min(), known.max()])

    if reduce is not None:
        ends = reduce.max(ends)
    span = ends[1] + ends[0]
    if not span > 0:
        return torch.full_like(lengths, band[0])

    place = (lengths + ends[0]) / span

    return band[0] + (band[1] - band[0]) * place


def with_mean_one(weights: Tensor, valid: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Weights divided by their mean over the batch's valid samples; 0 for the others. All
    `(bs,)`."""
    inside = under_mask(weights.double(), valid)
    total, count = global_sum(torch.stack([inside.sum(), valid.double().sum()]), reduce).unbind()
    return inside * (count / total) if total > 0 else inside
