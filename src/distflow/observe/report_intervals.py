"""How sure a share is: error bars of accuracies."""

import math
from collections.abc import Mapping, Sequence

Z_95 = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""


def wilson(share: float, number: float) -> tuple[float, float]:
    """The 95 % score interval of a share of `number` independent trials (Wilson, JASA 22:158, 1927).

    Unlike the normal one it stays within [0, 1], and has a width at shares of 0 and 1.
    """
    squared = Z_95 * Z_95 / number
    middle = (share + squared / 2) / (1 + squared)
    half = Z_95 * math.sqrt(share * (1 - share) / number + squared / (4 * number)) / (1 + squared)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def error_bars(
    columns: Mapping[str, Sequence[float | str | None]], trials: Mapping[str, int]
) -> dict[str, list[list[float] | None]]:
    """An interval for each value of the columns `val_correct/DOMAIN/...`, None where there is no share.

    trials: the held-out problems of each domain, "all" among them. Several answers to a problem are no more trials.
    """
    bars: dict[str, list[list[float] | None]] = {}
    for name, values in columns.items():
        group, _, rest = name.partition("/")
        number = trials.get(rest.rpartition("/")[0], 0) if group == "val_correct" else 0
        if number:
            bars[name] = [_interval(value, number) for value in values]
    return bars


def _interval(value: float | str | None, number: int) -> list[float] | None:
    if not isinstance(value, float) or not 0 <= value <= 1:
        return None
    return [float(f"{end:.4g}") for end in wilson(value, number)]
