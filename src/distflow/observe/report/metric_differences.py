"""The metrics of two runs compared, and whether noise explains a difference."""

import math
from collections.abc import Sequence
from typing import Any

from distflow.observe.findings.finding import Steps

LAST = 50
"""The values of each run that count."""

_DRAWS = 1000
_BLOCKS = 4
_WIDTH = 2.447 * math.sqrt(_BLOCKS / (_BLOCKS - 1))
"""Standard errors of half an interval of 95 %: t of 4 blocks on each side, which estimate the
spread themselves."""


def compared_metrics(a: Steps, b: Steps) -> list[dict[str, Any]]:
    """The metrics that both runs have, over their last common steps. differs: None if unknown."""
    steps = sorted(a.keys() & b.keys())
    names = [{name for values in run.values() for name in values} for run in (a, b)]
    found = []
    for name in sorted(names[0] & names[1]):
        sides = []
        for run in (a, b):
            values = [run[step].get(name, math.nan) for step in steps]
            sides.append([value for value in values if math.isfinite(value)][-LAST:])
        if all(sides):
            found.append({"metric": name, **_compared(sides)})
    return found


def _compared(sides: Sequence[Sequence[float]]) -> dict[str, Any]:
    """By drawing blocks, each a quarter of the values, since neighbours are correlated."""
    import numpy as np

    means = [math.fsum(values) / len(values) for values in sides]
    moved = means[1] - means[0]
    number = min(map(len, sides))
    found = {"a": means[0], "b": means[1], "difference": moved, "values": number}
    if number < 3 * _BLOCKS:
        return {**found, "low": None, "high": None, "differs": None}
    drawn = []
    draw = np.random.default_rng(0)
    for values in sides:
        block = -(-len(values) // _BLOCKS)
        starts = draw.integers(0, len(values), (_DRAWS, _BLOCKS, 1))
        places = (starts + np.arange(block)) % len(values)
        drawn.append(np.array(values)[places].mean((1, 2)))
    half = _WIDTH * float((drawn[1] - drawn[0]).std())
    return {**found, "low": moved - half, "high": moved + half, "differs": abs(moved) > half}
