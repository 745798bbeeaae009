"""The metrics of two runs compared, and whether noise explains a difference."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from distflow.observe.findings.finding import Steps

LAST = 50
"""The steps that count."""

_BLOCKS = 4
_FEWEST = 12
_QUANTILE = 2.447
"""Standard errors of half an interval of 95 %: of Student's t with the 6 degrees of freedom that
4 blocks on each side leave."""


def compared_metrics(a: Steps, b: Steps) -> list[dict[str, Any]]:
    """The metrics that both runs have, over the last steps at which both have a number. differs:
    None if unknown."""
    steps = sorted(a.keys() & b.keys())
    names = [set[str]().union(*run.values()) for run in (a, b)]

    found = []
    for name in sorted(names[0] & names[1]):
        both = [(a[step].get(name, math.nan), b[step].get(name, math.nan)) for step in steps]
        pairs = [pair for pair in both if all(map(math.isfinite, pair))][-LAST:]
        if pairs:
            first, second = zip(*pairs, strict=True)
            found.append({"metric": name, **_compare(first, second)})

    return found


def _compare(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """Neighbouring values are correlated, so the spread is that of means of blocks."""
    first = statistics.fmean(a)
    second = statistics.fmean(b)
    moved = second - first
    found = {"a": first, "b": second, "difference": moved, "values": len(a)}
    if len(a) < _FEWEST:
        return {**found, "low": None, "high": None, "differs": None}

    half = _QUANTILE * math.sqrt((_block_variance(a) + _block_variance(b)) / _BLOCKS)

    return {**found, "low": moved - half, "high": moved + half, "differs": abs(moved) > half}


def _block_variance(values: Sequence[float]) -> float:
    ends = [place * len(values) // _BLOCKS for place in range(_BLOCKS + 1)]
    means = [statistics.fmean(values[ends[i] : ends[i + 1]]) for i in range(_BLOCKS)]
    return statistics.variance(means)
