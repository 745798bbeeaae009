"""A metric of a whole run in a line of text: bars, each for as many steps."""

import math
from collections.abc import Sequence
from itertools import pairwise

WIDTH = 40
"""Bars at most."""
_BARS = "▁▂▃▄▅▆▇█"


class Curve:
    """The values of a whole run: means of equally many neighbours, so that there are never many."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self._means: list[float] = []
        self._each, self._open = 1, list[float]()

    def append(self, value: float) -> None:
        if math.isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)
        self._open.append(value)
        if len(self._open) == self._each:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == 4 * WIDTH:
            self._means, self._each = means(self._means, 2 * WIDTH), 2 * self._each

    @property
    def values(self) -> list[float]:
        return self._means + ([_mean(self._open)] if self._open else [])


def sparkline(values: Sequence[float], width: int) -> str:
    """The values in `width` bars at most, between the least and the greatest; one that is not finite is "×"."""
    shown = means(values, max(width, 0)) if len(values) > width else values
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(value: float) -> str:
        height = (value - low) / (high - low) if high > low else 0.5
        return _BARS[min(int(height * len(_BARS)), len(_BARS) - 1)]

    return "".join(bar(value) if math.isfinite(value) else "×" for value in shown)


def means(values: Sequence[float], number: int) -> list[float]:
    """The means of so many parts of the values, in their order; of as many values each, or one more."""
    ends = [len(values) * part // max(number, 1) for part in range(number + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(ends)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
