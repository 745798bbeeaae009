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
    found = []
    for name in sorted(
        set.intersection(*({name for values in run.values() for name in values} for run in runs))
    ):
        values = [_last([run[s][name] for s in steps if name in run[s]]) for run in runs]
        if all(values):
            first = values[: len(a)]
            second = values[len(a) :]
            compared = (
                _over_steps(first[0], second[0]) if len(runs) == 2 else _over_seeds(first, second)
            )
            found.append({"metric": name, **compared})
    return found


def _last(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)][-LAST:]


def _over_steps(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """By drawing blocks, each a quarter of the values, since neighbours are correlated."""
    import numpy as np

    sides = [np.array(values) for values in (a, b)]
    moved = float(sides[1].mean() - sides[0].mean())
    found = {"a": float(sides[0].mean()), "b": float(sides[1].mean()), "difference": moved}
    found["values"] = min(len(a), len(b))
    if found["values"] < 3 * _BLOCKS:
        return {**found, **_interval(moved, None)}
    means = []
    draw = np.random.default_rng(0)
    for values in sides:
        block = -(-len(values) // _BLOCKS)
        starts = draw.integers(0, len(values), (_DRAWS, _BLOCKS, 1))
        means.append(values[(starts + np.arange(block)) % len(values)].mean((1, 2)))
    return {**found, **_interval(moved, _WIDTH * float((means[1] - means[0]).std()))}


def _over_seeds(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, Any]:
    """By the spread of the runs' means, which is taken to be the same on both sides."""
    sides = [[math.fsum(values) / len(values) for values in side] for side in (a, b)]
    means = [math.fsum(side) / len(side) for side in sides]
    freedom = len(a) + len(b) - 2
    squares = math.fsum(
        (value - mean) ** 2 for side, mean in zip(sides, means, strict=True) for value in side
    )
    error = math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.72 / freedom
    found = {
        "a": means[0],
        "b": means[1],
        "difference": means[1] - means[0],
        "values": min(map(len, (*a, *b))),
    }
    return {**found, **_interval(found["difference"], t * error)}


def _interval(moved: float, half: float | None) -> dict[str, Any]:
    if half is None:
        return {"low": None, "high": None, "differs": None}
    return {"low": moved - half, "high": moved + half, "differs": abs(moved) > half}
