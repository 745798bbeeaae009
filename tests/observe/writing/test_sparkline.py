"""The curve of a whole run, however long, in a few bars."""

import math

from distflow.observe.writing.terminal_view import WIDTH, Curve, means, sparkline


def test_bars_run_from_the_least_to_the_greatest() -> None:
    assert sparkline([0.0, 0.5, 1.0, float("nan"), float("inf")], 5) == "▁▅█××"
    assert (
        sparkline([2.0, 2.0], 9) == "▅▅"
        and sparkline([], 9) == ""
        and sparkline([1.0, 2.0], 0) == ""
    )
    assert sparkline([0.0, 2.0, 3.0, 5.0], 2) == "▁█"
    assert sparkline([0.0, float("nan"), 3.0, 5.0], 2) == "×▅"


def test_a_curve_is_of_the_whole_run() -> None:
    curve = Curve()
    values = [math.sin(step / 900) + (step % 7) / 50 for step in range(5000)]
    for value in values:
        curve.append(value)
    assert (curve.low, curve.high) == (min(values), max(values))
    assert len(curve.values) <= 4 * WIDTH
    shown = means(curve.values, WIDTH)
    expected = [sum(values[i : i + 125]) / 125 for i in range(0, 5000, 125)]
    assert all(abs(one - other) < 0.15 for one, other in zip(shown, expected, strict=True))


def test_a_value_that_is_not_finite_stays_in_sight_and_out_of_the_range() -> None:
    curve = Curve()
    for step in range(1000):
        curve.append(float("nan") if step == 3 else float(step))
    assert (
        sparkline(curve.values, WIDTH)[0] == "×" and sparkline(curve.values, WIDTH).count("×") == 1
    )
    assert (curve.low, curve.high) == (0.0, 999.0)
