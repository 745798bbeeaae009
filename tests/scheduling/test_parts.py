"""Steps that are taken in parts, and groups of rows that somebody offers."""

from hypothesis import given
from hypothesis import strategies as st

from distflow.scheduling.coordinator import LOST, Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.ledger import Ledger
from tests.ledger_audit import verify


def plan_of(staleness: int = 0, batch: int = 2, **changed: object) -> DataPlan:
    values = {
        "num_rows": 5,
        "consumer_batch": batch,
        "group_size": 1,
        "total_groups": None,
        "total_steps": 50,
    }
    return DataPlan(max_staleness=staleness, shuffle=False, **{**values, **changed})


@given(
    staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    choices=st.lists(st.integers(0, 999), max_size=200),
)
def test_whatever_the_parts_no_group_gets_too_old(staleness, batch, choices):
    """Ends groups in any order, drops some, takes parts of any size, releases whenever nothing is
    owed."""
    coordinator = Coordinator(plan_of(staleness, batch))
    running = []
    taken = 0
    for choice in choices:
        running += coordinator.issue_groups()
        if running and choice % 4 < 2:
            prompt_group = running.pop(choice % len(running))
            if choice % 7 == 0:
                coordinator.drop(prompt_group.group_id, "rejected")
            else:
                coordinator.complete(prompt_group.group_id, 1, prompt_group.version)
        elif choice % 4 == 2:
            numbers = coordinator.part(coordinator.step, 1 + choice % (2 * batch))
            taken += len(numbers or ())
        elif taken and not coordinator.queue.num_owed():
            coordinator.release(coordinator.step)
            taken = 0

    coordinator.checked_counts().check()


@given(staleness=st.integers(0, 3), size=st.integers(1, 5), order=st.randoms(use_true_random=False))
def test_a_loop_that_takes_its_batch_in_parts_owes_nothing_and_never_stalls(staleness, size, order):
    batch = 2 * size
    coordinator = Coordinator(plan_of(staleness, batch))

    running = []
    for step in range(8):
        sizes = [size, batch - size]
        while sizes:
            running += coordinator.issue_groups()
            if coordinator.part(step, sizes[0]):
                sizes.pop(0)
                continue

            assert not coordinator.stalled
            prompt_group = running.pop(order.randrange(len(running)))
            coordinator.complete(prompt_group.group_id, 1, prompt_group.version)

        assert coordinator.queue.num_owed() == 0
        coordinator.release(step)

    assert coordinator.checked_counts().consumed == 8 * batch


def test_a_part_that_was_short_leaves_its_slots_to_rows_that_are_offered_later():
    coordinator = Coordinator(plan_of(batch=8, total_groups=2))
    for prompt_group in coordinator.issue_groups():
        coordinator.complete(prompt_group.group_id, 1)
    assert coordinator.part(0, 4) == (0, 1)
    for _ in range(6):
        coordinator.offer()
    later = coordinator.issue_groups()
    for prompt_group in later:
        coordinator.complete(prompt_group.group_id, 1)
    assert len(later) == 6 and coordinator.part(0, 6) == tuple(range(2, 8))


def test_a_step_that_took_too_few_owes_the_rest():
    coordinator = Coordinator(plan_of(batch=3))
    for prompt_group in coordinator.issue_groups():
        coordinator.complete(prompt_group.group_id, 1)
    assert coordinator.part(0, 1) == (0,) and coordinator.queue.num_owed() == 2
    assert coordinator.part(0, 2) == (1, 2) and coordinator.queue.num_owed() == 0
    assert coordinator.part(0, 1) is None and coordinator.stalled
    coordinator.release(0)
    coordinator.issue_groups()
    assert not coordinator.stalled


def test_offered_rows_go_first_and_no_row_of_the_data_is_passed_over(tmp_path):
    coordinator = Coordinator(plan_of(batch=3), Ledger(tmp_path / "ledger.jsonl"))
    assert [coordinator.offer(), coordinator.offer()] == [5, 6]
    assert [(t.epoch, t.row) for t in coordinator.issue_groups()] == [(0, 5), (0, 6), (0, 0)]
    for number in range(3):
        coordinator.complete(number, 1)
    coordinator.ready(0)
    coordinator.release(0)
    assert coordinator.offer() == 7
    assert [t.row for t in coordinator.issue_groups()] == [7, 1, 2]
    verify(tmp_path / "ledger.jsonl")


def test_while_the_data_are_shut_only_offered_rows_are_handed_out():
    coordinator = Coordinator(plan_of(staleness=1))
    coordinator.prompt_groups.data_open = False
    assert coordinator.issue_groups() == [] and coordinator.stalled
    coordinator.offer()
    assert not coordinator.stalled
    assert [prompt_group.row for prompt_group in coordinator.issue_groups()] == [5]
    coordinator.prompt_groups.data_open = True
    assert [prompt_group.row for prompt_group in coordinator.issue_groups()] == [0, 1, 2]


def test_an_offer_behind_the_end_of_the_data_is_taken_too():
    coordinator = Coordinator(plan_of(batch=2, num_rows=2, total_groups=2))
    for prompt_group in coordinator.issue_groups():
        coordinator.complete(prompt_group.group_id, 1)
    coordinator.ready(0)
    coordinator.release(0)
    assert coordinator.finished
    coordinator.offer()
    assert not coordinator.finished
    (prompt_group,) = coordinator.issue_groups()
    coordinator.complete(prompt_group.group_id, 1)
    assert coordinator.ready(1) == (2,), "a short step"


def test_offered_rows_that_ran_when_the_process_ended_are_dropped_as_lost(tmp_path):
    path = tmp_path / "ledger.jsonl"
    coordinator = Coordinator(plan_of(staleness=1, batch=1), Ledger(path))
    coordinator.offer()
    coordinator.issue_groups()  # the offered row, and row 0 of the data
    coordinator.complete(1, 1)
    assert coordinator.part(0, 1) == (1,)
    coordinator.release(0)
    snapshot = coordinator.snapshot()
    resumed = Coordinator(plan_of(staleness=1, batch=1), Ledger(path, mark_of(snapshot)), snapshot)
    assert resumed.checked_counts().dropped == {LOST: 1}
    assert [prompt_group.row for prompt_group in resumed.issue_groups()] == [1, 2]
    verify(path)
