"""How well noise is told from a difference, between two runs."""

import math
import random
from collections.abc import Sequence

import pytest

from distflow.observe.findings.finding import Steps
from distflow.observe.report.metric_differences import compared_metrics


def run_of(values: Sequence[float], **others: float) -> Steps:
    return {step: {"x": value, **others} for step, value in enumerate(values, 1)}


def series(seed: int, correlation: float, mean: float = 0.0, number: int = 150) -> list[float]:
    draw = random.Random(seed)
    value = 0.0
    found = list[float]()
    for _ in range(number):
        value = correlation * value + draw.gauss(0, 1)
        found.append(mean + value)

    return found


def test_a_run_equals_itself_and_a_short_one_tells_nothing():
    same = run_of(series(0, 0.5), lr=1e-6)
    assert [found["differs"] for found in compared_metrics(same, same)] == [False, False]
    assert compared_metrics(run_of([1.0] * 5), run_of([2.0] * 5)) == [
        {
            "metric": "x",
            "a": 1.0,
            "b": 2.0,
            "difference": 1.0,
            "values": 5,
            "low": None,
            "high": None,
            "differs": None,
        }
    ]
    assert compared_metrics(run_of([math.nan]), run_of([1.0])) == []


def test_only_steps_count_at_which_both_runs_have_the_metric():
    """Validation is seldom, and each run has its own steps of it."""
    first: Steps = {0: {"val": 1.0}, 5: {"val": 7.0}, 10: {"val": 3.0}, 16: {"x": 0.0}}
    second: Steps = {0: {"val": 2.0}, 5: {"val": math.nan}, 10: {"val": 6.0}, 16: {"val": 100.0}}
    (found,) = compared_metrics(first, second)
    assert (found["a"], found["b"], found["values"]) == (2.0, 4.0, 2)
    assert compared_metrics({0: {"val": 1.0}, 3: {}}, {0: {}, 3: {"val": 1.0}}) == []


@pytest.mark.parametrize(("correlation", "most"), [(0.0, 10), (0.5, 12), (0.8, 18)])
def test_equal_runs_seldom_differ_also_if_their_steps_are_correlated(correlation, most):
    """Of 100 pairs, of which an interval of 95 % allows about 5."""

    def differs(i: int, shift: float) -> bool:
        a, b = (run_of(series(2 * i + side, correlation, side * shift)) for side in (0, 1))
        (found,) = compared_metrics(a, b)
        return bool(found["differs"])

    assert sum(differs(i, 0.0) for i in range(100)) <= most
    assert sum(differs(i, 6.0) for i in range(20)) >= 18
