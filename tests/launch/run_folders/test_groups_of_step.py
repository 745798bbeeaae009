"""What a step was made of, read back from journals that a coordinator wrote."""

import pytest

from distflow.errors import UserError
from distflow.launch.run_folders import groups_of_step
from distflow.launch.run_folders.groups_of_step import step_lineage
from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan, place
from distflow.scheduling.ledger import Ledger, LedgerError
from tests.ledger_audit import verify


def plan_of(**options):
    defaults = {
        "num_rows": 10,
        "consumer_batch": 2,
        "group_size": 4,
        "total_groups": 40,
        "total_steps": 20,
    }
    return DataPlan(**{**defaults, **options})


def run_step(coordinator, drop=()):
    """One step, its groups judged in waves; the groups in `drop` are dropped."""
    while (numbers := coordinator.ready(coordinator.step)) is None:
        for group_id in coordinator.issue_groups():
            if group_id.group_id in drop:
                coordinator.drop(group_id.group_id, "equal_rewards")
            else:
                coordinator.complete(group_id.group_id, 5 + group_id.group_id)

    coordinator.release(coordinator.step)
    return numbers


def test_groups_that_no_step_takes_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        Coordinator(plan_of(), ledger).issue_groups()
    assert step_lineage(path, 1).groups
    monkeypatch.setattr(groups_of_step, "_MAX_GROUPS", 1)
    with pytest.raises(LedgerError, match="more than 1 groups"):
        step_lineage(path, 1)


def test_a_step_has_the_groups_that_it_consumed_and_the_drops_before_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        coordinator = Coordinator(plan_of(), ledger)
        consumed = [run_step(coordinator, drop=(1, 3, 4)) for _ in range(3)]

    for step, numbers in enumerate(consumed, start=1):
        lineage = step_lineage(path, step)
        assert tuple(group.group_id for group in lineage.groups) == numbers
        assert [(group.epoch, group.row) for group in lineage.groups] == [
            place(n, 10, 1, True) for n in numbers
        ]
        assert [(group.version, group.tokens) for group in lineage.groups] == [
            (step - 1, 5 + n) for n in numbers
        ]
        assert (lineage.weights, lineage.max_staleness, lineage.consumed_at is not None) == (
            step,
            0,
            True,
        )

    assert [
        [group.group_id for group in step_lineage(path, step).dropped] for step in (1, 2, 3)
    ] == [[1], [3, 4], []]
    assert {group.reason for group in step_lineage(path, 2).dropped} == {"equal_rewards"}


def test_workers_and_attempts_of_groups_that_were_lost(tmp_path):
    """Group 0 is lost once, group 1 three times, which quarantines it. The journal still adds
    up."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        coordinator = Coordinator(plan_of(), ledger)
        for attempt in range(3):
            for group_id in coordinator.issue_groups():
                coordinator.assign({group_id.group_id: f"rank-{group_id.group_id + attempt}"})
                if group_id.group_id == 1 or (group_id.group_id, attempt) == (0, 0):
                    coordinator.retry(group_id.group_id)
                else:
                    coordinator.complete(group_id.group_id, 5)

        run_step(coordinator)

    first, second = step_lineage(path, 1).groups
    assert (first.attempts, first.worker) == (2, "rank-1")
    assert (second.group_id, second.attempts) == (2, 1)
    (dropped,) = step_lineage(path, 1).dropped
    assert (dropped.group_id, dropped.reason) == (1, "max_retries")
    assert (dropped.attempts, dropped.worker) == (3, "rank-3")
    assert verify(path).dropped == {"max_retries": 1}


def test_what_a_resume_took_back_is_no_part_of_it(tmp_path):
    """Killed in step 3, within a line; gone on from the end of step 1, where another group was
    dropped."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        coordinator = Coordinator(plan_of(), ledger)
        run_step(coordinator)
        snapshot = coordinator.snapshot()
        run_step(coordinator, drop=(3,))
        coordinator.issue_groups()

    with path.open("ab") as file:
        file.write(b'{"t":1,"restart":0,"kind":"comp')
    assert [group.group_id for group in step_lineage(path, 2).dropped] == [3]
    with Ledger(path, mark_of(snapshot)) as ledger:
        run_step(Coordinator(plan_of(), ledger, snapshot), drop=(2,))
    lineage = step_lineage(path, 2)
    assert [group.group_id for group in lineage.dropped] == [2] and lineage.restart == 1
    assert [group.group_id for group in lineage.groups] == [3, 4]
    assert [group.attempts for group in lineage.groups] == [1, 1]


def test_the_step_under_way_when_a_run_was_killed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        coordinator = Coordinator(plan_of(), ledger)
        run_step(coordinator)
        done, _ = coordinator.issue_groups()
        coordinator.complete(done.group_id, 9)

    lineage = step_lineage(path, 2)
    assert (lineage.consumed_at, lineage.weights) == (None, None)
    assert [(group.group_id, group.version, group.tokens) for group in lineage.groups] == [
        (2, 1, 9),
        (3, None, None),
    ]


@pytest.mark.parametrize("step", [-1, 0, 3, 10**30])
def test_a_step_that_is_not_there(tmp_path, step):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        coordinator = Coordinator(plan_of(), ledger)
        run_step(coordinator)
        run_step(coordinator)

    with pytest.raises(UserError, match=f"no step {step}: .* 1 to 2"):
        step_lineage(path, step)


def test_a_ledger_that_is_missing_empty_or_damaged(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(UserError, match=r"no .*ledger\.jsonl"):
        step_lineage(path, 1)
    path.touch()
    with pytest.raises(UserError, match="none .* consumed"):
        step_lineage(path, 1)

    for odd in ('"group_id":[1]', '"group_ids":7,"step":0', '"step":"x","group_ids":[]'):
        kind = "issued" if 'ticket"' in odd else "consumed"
        path.write_text(f'{{"t":1,"restart":0,"kind":"{kind}",{odd}}}\n')
        with pytest.raises(LedgerError, match=r"ledger\.jsonl is damaged"):
            step_lineage(path, 1)
