"""Which steps are audited, and for which versions weights are kept for the audit."""

import pytest
import torch
from torch import nn

from distflow.audit import audit_schedule as module
from distflow.audit.audit_schedule import AuditSchedule, Depth
from distflow.audit.model_forward import KeptWeights

PLACES = (5, 34, 46)  # drawn, of the first windows of 20 steps


def audited(schedule: AuditSchedule, steps: range) -> list[int]:
    found = []
    for step in steps:
        if schedule.is_due(step):
            schedule.begins()
            found.append(step)
    return found


@pytest.mark.parametrize(("staleness", "first"), [(0, [0, 1]), (2, [0, 1, 3]), (4, [0, 1, 5])])
def test_the_first_steps_and_a_drawn_one_of_each_window(staleness: int, first: list[int]) -> None:
    assert audited(AuditSchedule(20, 0, staleness), range(60)) == sorted({*first, *PLACES})


def test_never_and_always() -> None:
    assert audited(AuditSchedule(0, 0), range(9)) == []
    assert audited(AuditSchedule(1, 0, 2), range(9)) == list(range(9))
    assert audited(AuditSchedule(20, 7, 2, others=(12,)), range(7, 30)) == [7, 8, 10, 12]


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_audit_that_costs_too_much_waits_until_its_weights_were_kept(
    monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    schedule = AuditSchedule(20, 0, staleness)
    assert len(audited(schedule, range(5))) == (2 if staleness == 0 else 3)
    schedule.begins()
    schedule.begins()
    with schedule.timed(4, Depth.AUDIT):
        now += 10.0
    assert audited(schedule, range(5, 30)) == []
    now += 4100.0  # affordable again
    due = 30 if staleness == 0 else 30 + staleness + 1
    expected = {step: schedule.is_due(step) or schedule.expects(step) for step in range(30, due)}
    assert all(expected[step] for step in range(due - staleness, due))
    assert schedule.is_due(due)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_whatever_an_audit_may_meet_was_expected(staleness: int) -> None:
    schedule = AuditSchedule(20, 0, staleness)
    kept: set[int] = set()
    for step in range(60):
        if schedule.is_due(step):
            assert set(range(max(step - staleness, 0), step)) <= kept
            schedule.begins()
        if schedule.expects(step):
            kept.add(step)
    assert len(kept) < 40, "no copy is made where no audit is near"


def test_copies_are_few_are_cast_and_are_those_of_their_time() -> None:
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
    kept.keep(6, layer)
    assert kept.of(6) is kept.of(5), "the same weights need no second copy"
    kept.forget(5)
    assert kept.of(5) is None and len(kept) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only entry is the time."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def spend(
    schedule: AuditSchedule, clock: list[float], step: int, depth: Depth, seconds: float
) -> None:
    with schedule.timed(step, depth):
        clock[0] += seconds


def test_quick_looks_come_where_looks_have_used_up_their_share(clock: list[float]) -> None:
    schedule = AuditSchedule(20, 0)
    clock[0] = 1000.0
    assert schedule.looks_at(0) is schedule.looks_at(10) is Depth.LOOK
    spend(schedule, clock, 20, Depth.LOOK, 4.5)
    assert schedule.looks_at(8) is Depth.LOOK, "one of the first is made whatever it costs"
    assert schedule.looks_at(21) is Depth.QUICK
    spend(schedule, clock, 21, Depth.QUICK, 2.5)
    assert schedule.looks_at(22) is Depth.BASE
    spend(schedule, clock, 22, Depth.BASE, 8.5)
    assert schedule.looks_at(22) is Depth.NONE, "the share of what most steps have is used up too"
    clock[0] = 2300.0
    assert schedule.looks_at(23) is Depth.LOOK
    assert AuditSchedule(0, 0).looks_at(0) is Depth.NONE


def test_looks_are_spread_over_the_run_whatever_they_cost(clock: list[float]) -> None:
    schedule = AuditSchedule(20, 7, last_step=149)
    spend(schedule, clock, 30, Depth.LOOK, 100.0)
    looked = [step for step in range(7, 150) if schedule.looks_at(step) is Depth.LOOK]
    assert looked == [
        *range(7, 16),
        *(7 + since for since in (12, 16, 24, 32, 48, 64, 96, 128)),
        149,
    ]


def test_what_the_first_ones_cost_is_made_up_for(clock: list[float]) -> None:
    schedule = AuditSchedule(20, 0)
    schedule.begins()
    spend(schedule, clock, 0, Depth.AUDIT, 100.0)
    clock[0] = 1000.0
    spend(schedule, clock, 30, Depth.LOOK, 1.0)
    assert schedule.looks_at(31) is Depth.QUICK, (
        "a quarter of the share of 2 s while more than 1 % is spent"
    )
    spend(schedule, clock, 31, Depth.NONE, 0.0)
    clock[0] = 6000.0
    spend(schedule, clock, 32, Depth.LOOK, 40.0)
    assert schedule.looks_at(33) is Depth.QUICK
    clock[0] = 21000.0
    assert schedule.looks_at(33) is Depth.LOOK, "all of the share again"


def test_a_run_of_seconds_has_the_time_for_checks_of_a_run_of_a_minute(clock: list[float]) -> None:
    schedule = AuditSchedule(20, 0)
    spend(schedule, clock, 20, Depth.LOOK, 0.1)
    assert schedule.looks_at(21) is Depth.LOOK, "0.2 % of a minute"
    spend(schedule, clock, 21, Depth.LOOK, 0.1)
    assert schedule.looks_at(22) is Depth.QUICK
