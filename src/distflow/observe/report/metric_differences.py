"""The metrics of runs compared, and whether noise explains a difference: over seeds if a side has
several runs, else over blocks of steps."""

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
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The same of Student's t by degrees of freedom."""


def compared_metrics(a: Sequence[Steps], b: Sequence[Steps]) -> list[dict[str, Any]]:
    """The metrics that all runs of two sides have, over their last common steps. differs: None if
    unknown."""
    runs = [*a, *b]
    steps = sorted(set.intersection(*map(set, runs)))
    names = [{name for values in run.values() for name in values} for run in runs]
    found = []
    for name in sorted(set.intersection(*names)):
        values = []
        for run in runs:
            values.append(_last([run[step][name] for step in steps if name in run[step]]))
        if not all(values):
            continue
        if len(runs) == 2:
            compared = _over_steps(values[0], values[1])
        else:
            compared = _over_seeds(values[: len(a)], values[len(a) :])
        found.append({"metric": name, **compared})
    return found


def _last(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)][-LAST:]


def _over_steps(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """By drawing blocks, each a quarter of the values, since neighbours are correlated."""
    import numpy as np

    sides = [np.array(values) for values in (a, b)]
    means = [float(side.mean()) for side in sides]
    moved = means[1] - means[0]
    found = {"a": means[0], "b": means[1], "difference": moved, "values": min(len(a), len(b))}
    if found["values"] < 3 * _BLOCKS:
        return {**found, **_interval(moved, None)}
    drawn = []
    draw = np.random.default_rng(0)
    for values in sides:
        block = -(-len(values) // _BLOCKS)
        starts = draw.integers(0, len(values), (_DRAWS, _BLOCKS, 1))
        places = (starts + np.arange(block)) % len(values)
        drawn.append(values[places].mean((1, 2)))
    spread = float((drawn[1] - drawn[0]).std())
    return {**found, **_interval(moved, _WIDTH * spread)}


def _over_seeds(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, Any]:
    """By the spread of the runs' means, which is taken to be the same on both sides."""
    sides = []
    squares = 0.0
    for side in (a, b):
        means = [math.fsum(values) / len(values) for values in side]
        middle = math.fsum(means) / len(means)
        squares += math.fsum((mean - middle) ** 2 for mean in means)
        sides.append(middle)
    moved = sides[1] - sides[0]
    freedom = len(a) + len(b) - 2
    error = math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.72 / freedom
    number = min(map(len, (*a, *b)))
    found = {"a": sides[0], "b": sides[1], "difference": moved, "values": number}
    return {**found, **_interval(moved, t * error)}


def _interval(moved: float, half: float | None) -> dict[str, Any]:
    if half is None:
        return {"low": None, "high": None, "differs": None}
    return {"low": moved - half, "high": moved + half, "differs": abs(moved) > half}
