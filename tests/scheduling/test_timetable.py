"""When a run saves and validates: by steps, epochs and seconds."""

import time
from dataclasses import replace

import pytest

from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan, Frequency, Timetable

PLAN = DataPlan(
    num_rows=4, consumer_batch=1, group_size=1, total_groups=12, total_steps=12, shuffle=False
)


def due_steps(coordinator: Coordinator, last: int, what: str = "save") -> list[int]:
    """The steps up to `last` after which something was due; the first prompt of each epoch is
    dropped."""
    found = []
    while coordinator.step < last:
        step = coordinator.step
        while coordinator.ready(step) is None:
            for group in coordinator.issue_groups():
                if group.row == 0:
                    coordinator.drop(group.group_id, "all_equal")
                else:
                    coordinator.complete(group.group_id, 1)

        coordinator.release(step)
        found += [coordinator.step] if what in coordinator.due else []

    return found


def test_an_epoch_ends_when_its_rows_were_trained_on_or_dropped():
    assert due_steps(Coordinator(replace(PLAN, saves=Frequency(epochs=1))), 9) == [3, 6, 9]
    assert due_steps(Coordinator(replace(PLAN, validates=Frequency(epochs=2))), 9, "validate") == [
        6,
        9,
    ], "the end"
    assert due_steps(Coordinator(replace(PLAN, saves=Frequency(steps=2, epochs=1))), 7) == [
        2,
        3,
        4,
        6,
    ]
    assert due_steps(Coordinator(PLAN), 9) == [], "never, not even at the end"


def test_a_resumed_run_counts_its_epochs_on():
    plan = replace(PLAN, saves=Frequency(epochs=2))
    first = Coordinator(plan)
    assert due_steps(first, 4) == []
    resumed = Coordinator(plan, snapshot=first.snapshot())
    assert due_steps(resumed, 8) == [6]


@pytest.fixture
def now(monkeypatch):
    """The clock."""
    seconds = [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: seconds[0])
        yield seconds


def test_seconds_count_from_what_was_last_due_for_any_reason(now):
    timetable = Timetable(Frequency(steps=5, secs=10.0), num_rows=100)
    found = []
    for step in range(1, 13):
        now[0] += 4.0
        found += [step] if timetable.is_due(step, step) else []

    assert found == [3, 5, 8, 10]
    assert timetable.secs == 8.0


def test_seconds_of_a_resumed_run_continue_and_a_break_does_not_count(now):
    timetable = Timetable(Frequency(secs=10.0), num_rows=100, secs=7.0)
    now[0] += 2.0
    assert not timetable.is_due(1, 1)
    now[0] += 1.0
    assert timetable.is_due(2, 2) and not timetable.is_due(3, 3)


def test_seconds_are_in_the_snapshot_where_they_count():
    by_clock = Coordinator(replace(PLAN, saves=Frequency(secs=1e6), validates=Frequency(steps=1)))
    due_steps(by_clock, 1)
    saved = by_clock.snapshot()["secs"]
    assert 0 < saved["save"] < 1e5 and saved["validate"] == 0.0
    saved["save"] = 2e6
    assert due_steps(Coordinator(by_clock.plan, snapshot=by_clock.snapshot()), 3) == [2]
    assert "secs" not in Coordinator(replace(PLAN, saves=Frequency(steps=1, epochs=1))).snapshot()
