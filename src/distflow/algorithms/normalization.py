"""Normalises rewards and advantages over the batch, the group or all values so far: `reward_norm`
and `adv_norm`.

Keys and formula are those of `NormConfig` and `Normalization` of AReaL 1.0, exact over the ranks.
The level "running" is ROLL's: `Moments` holds mean and variance of all rewards so far, over steps
and ranks, in float64.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import Groups
from distflow.algorithms.masked_reductions import Reduce, global_sum, under_mask


@dataclass(frozen=True)
class Moments:
    """squares: sum of the squared differences to the mean, to keep precision for large values."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def with_values(self, values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> "Moments":
        """These moments combined with the masked values of all ranks (Chan et al. 1979); the same
        on every rank."""
        inside = under_mask(values.double(), mask)
        count = float(global_sum((mask > 0).sum().double(), reduce))
        if count == 0:
            return self

        mean = float(global_sum(inside.sum(), reduce)) / count
        squares = float(global_sum(under_mask((inside - mean) ** 2, mask).sum(), reduce))
        total = self.count + count
        apart = mean - self.mean

        return Moments(
            total,
            self.mean + apart * count / total,
            self.squares + squares + apart**2 * self.count * count / total,
        )

    def std(self, unbiased: bool = True) -> float:
        """The standard deviation; 1 if there are too few values."""
        freedom = self.count - 1 if unbiased else self.count
        if freedom > 0:
            return math.sqrt(self.squares / freedom)
        return 1.0


Level = Literal["batch", "group", "running"]


@dataclass(frozen=True)
class Normalization:
    """(x − mean) / (std + eps), each over the global batch or the group; level None omits it.

    mean_leave1out: the mean that is subtracted from a value excludes that value. std_unbiased: over
    n − 1 values, and 1 for a single value. The standard deviation is that of the differences to
    this mean, even if the mean has another level, excludes the value, or is off (0). group_size:
    groups are cut into runs of this many episodes.

    "running" covers all values so far, including the current ones: their mean, and the standard
    deviation about it."""

    mean_level: Level | None = None
    mean_leave1out: bool = False
    std_level: Level | None = None
    std_unbiased: bool = True
    eps: float = 1e-5
    group_size: int | None = None

    def __call__(
        self,
        values: Tensor,
        mask: Tensor,
        group_index: Tensor,
        valid: Tensor | None = None,
        episode_index: Tensor | None = None,
        reduce: Reduce | None = None,
        moments: Moments | None = None,
    ) -> Tensor:
        """The values under the mask normalised, float64 `(bs, length)`, 0 elsewhere and for invalid
        samples.

        values, mask: `(bs, length)`; group_index, valid, episode_index: `(bs,)`. Each value under
        the mask counts separately; equal values of a batch or group differ from their mean by
        exactly 0. moments: of all values so far, including these, for "running". Raises ValueError
        if `group_size` is set without `episode_index`.
        """
        if self.group_size is not None:
            if episode_index is None:
                raise ValueError(
                    "group_size needs episode_index, because it splits groups by episode"
                )

            runs = torch.div(episode_index, self.group_size, rounding_mode="floor")
            group_index = torch.unique(
                torch.stack([group_index, runs]), dim=1, return_inverse=True
            )[1]

        groups = Groups(group_index, valid)
        counted = (mask > 0) & groups.valid[:, None]

        centred = under_mask(values.double(), counted)
        if self.mean_level == "running":
            assert moments is not None
            centred = under_mask(centred - moments.mean, counted)
        elif self.mean_level is not None:
            centred = self._centred(centred, _Pool(self.mean_level, groups, counted, reduce))

        if self.std_level == "running":
            assert moments is not None
            centred = centred / (moments.std(self.std_unbiased) + self.eps)
        elif self.std_level is not None:
            pool = _Pool(self.std_level, groups, counted, reduce)
            freedom = pool.count - 1 if self.std_unbiased else pool.count
            std = (pool.sum(centred.square()) / freedom).sqrt()
            undefined = (freedom < 1) | (pool.is_one_sample & self.std_unbiased)
            centred = centred / (torch.where(undefined, 1.0, std) + self.eps)

        return centred

    def _centred(self, values: Tensor, pool: "_Pool") -> Tensor:
        count = pool.count
        middle = pool.sum(values) / count

        # differences of large values are exact, their mean is not
        near = under_mask(values - middle, pool.counted)
        total = pool.sum(near)

        mean = total / count
        if self.mean_leave1out:
            mean = torch.where(count > 1, (total - near) / (count - 1), -middle)
            # no other sample: AReaL takes the value itself
            mean = torch.where(pool.is_one_sample, near, mean)

        equal = (count > 1) & (pool.max(values) == -pool.max(-values))
        return under_mask(torch.where(equal, 0.0, near - mean), pool.counted)


class _Pool:
    """The values normalised together: those of a group, or of the batch of all ranks. Methods
    return `(bs, 1)`."""

    def __init__(
        self, level: Level, groups: Groups, counted: Tensor, reduce: Reduce | None
    ) -> None:
        self.level = level
        self.groups = groups
        self.counted = counted
        self.reduce = reduce
        self.count = self.sum(counted)

    @property
    def is_one_sample(self) -> Tensor:
        """Whether a group has one valid sample, with any number of tokens."""
        return (self.groups.size[:, None] == 1) & (self.level == "group")

    def sum(self, values: Tensor) -> Tensor:
        rows = values.double().sum(dim=-1)
        if self.level == "group":
            return self.groups.sum(rows)[:, None]
        return global_sum(rows.sum(), self.reduce).expand(len(rows), 1)

    def max(self, values: Tensor) -> Tensor:
        """The maximum; −inf if no value counts."""
        inside = torch.where(self.counted, values, -torch.inf)
        rows = torch.cat([inside.new_full((len(inside), 1), -torch.inf), inside], dim=1).amax(dim=1)
        if self.level == "group":
            return self.groups.max(rows)[:, None]
        largest = torch.cat([rows.new_full((1,), -torch.inf), rows]).amax()
        return (largest if self.reduce is None else self.reduce.max(largest)).expand(len(rows), 1)
