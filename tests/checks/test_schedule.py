"""Which steps are checked, and for which versions weights are kept for them."""

import pytest
import torch
from torch import nn

from distflow.checks import schedule as module
from distflow.checks.kept_weights import KeptWeights
from distflow.checks.schedule import CheckSchedule, drawn_update


def due(schedule: CheckSchedule, steps: range) -> list[int]:
    return [step for step in steps if schedule.is_due(step)]


@pytest.fixture
def clock(monkeypatch):
    """The only entry is the time."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def spend(schedule: CheckSchedule, clock: list[float], seconds: float) -> None:
    with schedule.timed():
        clock[0] += seconds


def test_the_first_steps_powers_of_two_and_a_drawn_one_of_each_window():
    places = [step for step in due(CheckSchedule(20, 0), range(100)) if step > 16]
    windows = [step // 20 for step in places if step not in (32, 64)]
    assert windows == [1, 2, 3, 4] and {32, 64} <= {*places}
    assert due(CheckSchedule(20, 0), range(17))[:9] == [*range(9)]


def test_never_and_always():
    assert due(CheckSchedule(0, 0), range(9)) == []
    assert due(CheckSchedule(1, 0, 2), range(9)) == [*range(9)]


def test_steps_that_are_named_are_checked_whatever_they_cost(clock):
    schedule = CheckSchedule(5, 100, max_staleness=12, others=(150,), last_step=199)
    spend(schedule, clock, 1000.0)
    powers = [100 + 2**n for n in range(3, 7)]
    wanted = sorted([*range(100, 108), *powers, 113, 150, 199])
    assert due(schedule, range(100, 200)) == wanted


def test_drawn_steps_wait_until_their_time_is_there(clock):
    schedule = CheckSchedule(1000, 0)
    (place,) = (s for s in range(300, 1000) if s != 512 and schedule.is_due(s))
    spend(schedule, clock, 15.0)
    assert not schedule.is_due(place)
    clock[0] = 1001.0
    assert schedule.is_due(place), "1.5 % of the run's time"


def test_a_run_of_seconds_has_the_time_of_a_minute(clock):
    schedule = CheckSchedule(1000, 0)
    (place,) = (s for s in range(300, 1000) if s != 512 and schedule.is_due(s))
    spend(schedule, clock, 0.8)
    assert schedule.is_due(place)
    spend(schedule, clock, 0.2)
    assert not schedule.is_due(place)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_whatever_a_checked_step_may_meet_was_expected(staleness):
    schedule = CheckSchedule(20, 0, staleness)
    kept: set[int] = set()
    for step in range(100):
        if schedule.is_due(step):
            assert set(range(max(step - staleness, 0), step)) <= kept
        if schedule.expects(step):
            kept.add(step)

    assert len(kept) < 60, "no copy is made where no checked step is near"


def test_the_drawn_update_is_the_same_on_all_ranks():
    drawn = {drawn_update("actor", step, 4) for step in range(50)}
    assert drawn == {0, 1, 2, 3} and drawn_update("actor", 3, 0) == 0


def test_copies_are_few_are_cast_and_are_those_of_their_time():
    layer = nn.Linear(3, 2)
    kept = KeptWeights(3, torch.bfloat16)
    layer.bias.requires_grad_(False)

    for version in range(6):
        with torch.no_grad():
            layer.weight.fill_(version)
        kept.keep(version, layer)
        assert len(kept) <= 3

    assert kept.of(2) is None
    found = kept.of(4)
    assert found is not None and list(found) == ["weight"]
    assert found["weight"].dtype is torch.bfloat16 and bool((found["weight"] == 4).all())
    kept.forget(4)
    assert kept.of(4) is None and len(kept) == 1
