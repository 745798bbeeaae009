"""The fit gives back what was measured."""

import pytest

from distflow.planning.measured_rates import MeasuredSteps, Rates, fit

PLANNED = {"generate": 2.0, "forward": 0.0, "update": 4.0, "sync": 0.5, "rewards": 0.25}


def test_each_part_gets_its_own_rate_and_what_was_not_planned_is_the_rest():
    seconds = {"generate": 3.0, "forward": 0.0, "update": 2.0, "sync": 0.0, "rest": 1.25}
    rates = fit(MeasuredSteps(seconds, 0.2, 100, 1.5e9), PLANNED, 1.2e9, 0.6e9, "run")
    assert (rates.generate, rates.update, rates.sync) == (1.5, 0.5, 1.0), (
        "what took no time has the roofline's"
    )
    assert rates.rest == pytest.approx((1.25 - 0.25) / 100) and rates.score == pytest.approx(0.2)
    assert rates.libraries == pytest.approx(0.9e9) and rates.source == "run"


def test_a_pass_that_was_not_measured_has_the_rate_of_the_other():
    rates = fit(MeasuredSteps({"update": 2.0}, 0.0, 1), PLANNED, 0.0, 0.0, "run")
    assert rates.forward == rates.update == 0.5 and rates.libraries is None


def test_scoring_that_remains_is_that_of_the_late_groups_on_all_workers():
    rates = Rates(score=0.5)
    assert rates.rewards(64, 2, 0.5) == pytest.approx(8.0) and rates.rewards(64, 64, 0.0) == 0.5
    assert Rates().rewards(64, 2, 1.0) == 0.0
