"""Group filter (DAPO, arXiv:2503.14476), and sample masks and weights by length and difficulty.

Masks and weights are those of alibaba/ROLL (`get_sample_level_mask`, `compute_sample_weights`), except that difficulty
is measured on the group's own responses, invalid samples never count, and bounds and means are over the batch of all
ranks.
"""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import Groups
from distflow.algorithms.masked_reductions import Reduce, global_sum, under_mask

ALL_EQUAL = "all_equal"
TOO_FEW_SCORES = "too_few_scores"
MEAN_TOO_LOW, MEAN_TOO_HIGH = "mean_too_low", "mean_too_high"
Band = tuple[float, float]


def drop_reason(metric: Tensor, valid: Tensor | None = None, mean_range: Band | None = None) -> str | None:
    """Why a group teaches nothing, or None if it does.

    metric: `(n,)`, one value a sample. A group with fewer than two valid samples is `too_few_scores`; one whose valid
    samples all have the same metric is `all_equal`; one whose mean is not within the range `mean_too_low` or
    `mean_too_high`.
    """
    valid_metric = metric if valid is None else metric[valid.bool()]
    if valid_metric.numel() < 2:
        return TOO_FEW_SCORES
    if bool(valid_metric.max() == valid_metric.min()):
        return ALL_EQUAL
    low, high = mean_range or (-torch.inf, torch.inf)
    mean = float(valid_metric.double().mean())
    return MEAN_TOO_LOW if mean <= low else MEAN_TOO_HIGH if mean >= high else None


def share_right(accuracy: Tensor, group_index: Tensor, valid: Tensor) -> Tensor:
    """Mean accuracy of the group's valid samples, float64 `(bs,)`; 0 in a group without one. All `(bs,)`."""
    groups = Groups(group_index, valid)
    return groups.sum(accuracy.double()) / groups.size.clamp(min=1)


def is_within(share: Tensor, band: Band) -> Tensor:
    """bool `(bs,)`: above the low end and below the high one."""
    return (share > band[0]) & (share < band[1])


def difficulty_weights(share: Tensor, band: Band) -> Tensor:
    """From the band's first value if all samples are right to its second if none is. `(bs,)`."""
    return band[0] + (band[1] - band[0]) * (1.0 - share)


def length_weights(lengths: Tensor, valid: Tensor, band: Band, reduce: Reduce | None = None) -> Tensor:
    """From the band's first value for the batch's shortest valid response to its second for the longest; the first if
    all lengths are equal. lengths, valid: `(bs,)`."""
    lengths, counted = lengths.double(), valid.bool()
    lowest = torch.tensor([-torch.inf], dtype=torch.float64)
    ends = torch.stack([torch.cat([lowest, sign * lengths[counted]]).amax() for sign in (-1.0, 1.0)])
    ends = ends if reduce is None else reduce.max(ends)
    shortest, longest = -ends[0], ends[1]
    place = (lengths - shortest) / (longest - shortest) if longest > shortest else torch.zeros_like(lengths)
    return band[0] + (band[1] - band[0]) * place


def with_mean_one(weights: Tensor, valid: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Divide by the mean over the batch's valid samples; 0 for the others. Both `(bs,)`."""
    inside = under_mask(weights.double(), valid)
    total, count = global_sum(torch.stack([inside.sum(), valid.double().sum()]), reduce).unbind()
    return inside * (count / total) if total > 0 else inside
