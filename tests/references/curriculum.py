"""Weights of domains by what can be learned there (arXiv:2502.12272)."""

from collections.abc import Sequence


def learnability(groups: Sequence[tuple[int, int]]) -> float:
    """The mean of p (1 − p). groups: (right, scored) responses of each, at least one scored."""
    total = 0.0
    for right, scored in groups:
        p = right / scored
        total += p * (1.0 - p)
    return total / len(groups)


def moving_mean(values: Sequence[float], smoothing: float) -> float:
    """Σ over steps with a value; it starts with the first one."""
    found = values[0]
    for value in values[1:]:
        found = smoothing * found + (1.0 - smoothing) * value
    return found


def worth(weight: float, mean_learnability: float | None) -> float:
    """At least a fifth of the largest value, 1/4, which an unmeasured domain has."""
    if mean_learnability is None:
        return weight * 0.25
    return weight * max(mean_learnability, 0.05)
