"""Mean and variance of all values so far, over steps and ranks, in float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from distflow.algorithms.masking import Reduce, global_sum, under_mask


@dataclass(frozen=True)
class Moments:
    """squares: sum of the squared differences to the mean, so that digits are kept where values are large."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def with_values(self, values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> "Moments":
        """These and the values under the mask of all ranks (Chan et al. 1979); the same on every rank."""
        inside = under_mask(values.double(), mask)
        count = float(global_sum((mask > 0).sum().double(), reduce))
        if count == 0:
            return self
        mean = float(global_sum(inside.sum(), reduce)) / count
        squares = float(global_sum(under_mask((inside - mean) ** 2, mask).sum(), reduce))
        total, apart = self.count + count, mean - self.mean
        return Moments(
            total,
            self.mean + apart * count / total,
            self.squares + squares + apart**2 * self.count * count / total,
        )

    def std(self, unbiased: bool = True) -> float:
        """1 where there are too few values for one."""
        freedom = self.count - 1 if unbiased else self.count
        return math.sqrt(self.squares / freedom) if freedom > 0 else 1.0

    def state(self) -> dict[str, float]:
        """JSON values that `load` reads again."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @staticmethod
    def load(state: Mapping[str, float]) -> "Moments":
        """Nothing so far where the state is empty."""
        return Moments(**state)
