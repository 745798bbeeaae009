"""Means, deviations and whitening of plain numbers."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: Sequence[float], freedom: int) -> float:
    """The sum of the squared distances to the mean, over `freedom`."""
    middle = mean(values)
    # the mean is rounded, and what it leaves has a mean of its own
    near = [value - middle for value in values]
    rest = mean(near)
    return math.fsum((value - rest) ** 2 for value in near) / freedom


def std(values: Sequence[float]) -> float:
    """The unbiased standard deviation of at least two values; exactly 0 if all are equal."""
    if max(values) == min(values):
        return 0.0
    return math.sqrt(variance(values, len(values) - 1))


def above_mean(value: float, values: Sequence[float]) -> float:
    """value − mean, from differences, which are exact if all values are large."""
    return math.fsum(value - other for other in values) / len(values)


def whitened(values: Sequence[float]) -> list[float]:
    """(x − mean) / √(unbiased variance + 1e-8); fewer than two values are only centred."""
    scale = 1.0
    if len(values) > 1:
        scale = 1.0 / math.sqrt(std(values) ** 2 + 1e-8)
    return [above_mean(value, values) * scale for value in values]


def effective_sample_size(weights: Sequence[float]) -> float:
    """Kish: (Σw)² / (n Σw²); 0 if all weights are 0."""
    squares = math.fsum(weight * weight for weight in weights)
    if squares == 0.0:
        return 0.0
    return math.fsum(weights) ** 2 / (len(weights) * squares)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
