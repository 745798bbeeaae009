"""The coordinator: waves of groups, the end of the data, versions, resume, and what it refuses."""

import json

import pytest

from distflow.errors import UserError
from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan, place, total_steps
from distflow.scheduling.group_states import CountsError, GroupCounts, Version
from distflow.scheduling.ledger import Ledger, timeline
from distflow.scheduling.sample_queue import Exhausted
from tests.ledger_audit import verify


def plan_of(num_rows=10, batch=4, epochs=2, **options):
    options = {
        "total_groups": epochs * num_rows,
        "total_steps": total_steps(epochs, num_rows, batch),
        **options,
    }
    return DataPlan(num_rows=num_rows, consumer_batch=batch, group_size=8, **options)


def numbers_of(prompt_groups):
    return [prompt_group.group_id for prompt_group in prompt_groups]


def reward_fn(coordinator, prompt_groups, drop=()):
    for prompt_group in prompt_groups:
        if prompt_group.group_id in drop:
            coordinator.drop(prompt_group.group_id, "equal_rewards")
        else:
            coordinator.complete(prompt_group.group_id, 5)


def run_to_the_end(coordinator, drop=lambda prompt_group: False):
    """Consumed groups of each step, by the loop that a worker runs."""
    steps = []
    while not coordinator.finished:
        prompt_groups = coordinator.issue_groups()
        reward_fn(
            coordinator,
            prompt_groups,
            {prompt_group.group_id for prompt_group in prompt_groups if drop(prompt_group)},
        )

        if (numbers := coordinator.ready(coordinator.step)) is not None:
            coordinator.release(coordinator.step)
            steps.append(numbers)
        else:
            assert prompt_groups, "no step is formed and nothing runs: stuck"

    return steps


def test_a_released_step_is_on_the_disk(tmp_path):
    class Synced(Ledger):
        def sync(self):
            super().sync()
            on_disk.append(
                [record["kind"] for _, record in timeline(tmp_path / "ledger.jsonl")][-2:]
            )

    on_disk = []
    coordinator = Coordinator(plan_of(), Synced(tmp_path / "ledger.jsonl"))
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)
    assert on_disk == [["consumed", "version"]]


def test_tickets_name_the_rows_of_the_epochs_in_order():
    plan = plan_of(seed=3)
    seen = []

    coordinator = Coordinator(plan)
    while not coordinator.finished:
        prompt_groups = coordinator.issue_groups()
        seen += prompt_groups
        reward_fn(coordinator, prompt_groups)
        coordinator.release(coordinator.step)

    assert numbers_of(seen) == list(range(20))
    assert [(t.epoch, t.row) for t in seen] == [place(number, 10, 3, True) for number in range(20)]
    assert [t.version for t in seen] == [t.group_id // 4 for t in seen]
    assert {(t.group_size, t.attempt, t.stream) for t in seen} == {(8, 0, "train")}


def test_steps_cross_the_border_of_an_epoch_and_the_last_is_short():
    assert run_to_the_end(Coordinator(plan_of(num_rows=5, batch=4, epochs=2))) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9),
    ]


def test_an_engine_that_lags_gets_nothing_until_it_serves_the_new_version():
    coordinator = Coordinator(plan_of())
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)
    assert coordinator.issue_groups(engine_version=0) == []
    assert len(coordinator.issue_groups(engine_version=1)) == 4


def test_exhausted_after_the_batches_that_a_step_may_draw():
    coordinator = Coordinator(plan_of(num_rows=100, max_num_gen_batches=2))
    drawn = 0
    while prompt_groups := coordinator.issue_groups():
        drawn += len(prompt_groups)
        reward_fn(coordinator, prompt_groups, drop=range(1, 100))
        if drawn < 8:
            assert coordinator.ready(0) is None

    assert drawn == 8
    with pytest.raises(Exhausted, match="8 drawn.* 1 are"):
        coordinator.ready(0)


def test_going_on_when_exhausted_counts_the_short_step_as_full():
    plan = plan_of(
        num_rows=100, max_concurrent=64, max_num_gen_batches=1, when_exhausted="continue"
    )
    coordinator = Coordinator(plan)
    reward_fn(coordinator, coordinator.issue_groups(), drop=(0, 1))
    assert coordinator.ready(0) == (2, 3)
    coordinator.release(0)
    reward_fn(coordinator, coordinator.issue_groups())
    assert coordinator.ready(1) == (4, 5, 6, 7)


def test_a_short_step_counts_as_full_without_a_bound_on_its_tickets_too():
    """What it lacked is no credit of the next step, which would then leave groups behind."""
    plan = plan_of(num_rows=6, batch=4, epochs=1, max_concurrent=64)
    coordinator = Coordinator(plan)
    assert run_to_the_end(coordinator) == [(0, 1, 2, 3), (4, 5)]
    longer = plan_of(num_rows=6, batch=4, epochs=3, max_concurrent=64)
    resumed = Coordinator(longer, snapshot=coordinator.snapshot())
    assert numbers_of(resumed.issue_groups()) == [6, 7, 8, 9]


def test_a_lost_group_has_three_attempts_under_one_ticket(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coordinator = Coordinator(plan_of(max_staleness=1, max_concurrent=8), ledger)
    first = coordinator.issue_groups()[2]

    seen = [first]
    for _ in range(2):
        assert coordinator.retry(2), "it waits to be handed out again"
        seen += coordinator.issue_groups()

    assert [(t.group_id, t.row, t.attempt) for t in seen] == [(2, first.row, n) for n in range(3)]
    assert not coordinator.retry(2), "it is dropped"
    assert coordinator.checked_counts() == GroupCounts(
        issued=8, running=7, dropped={"max_retries": 1}
    )
    assert numbers_of(coordinator.issue_groups()) == [8], "its credit is free"
    ledger.close()
    assert verify(ledger.path) == coordinator.checked_counts()


def test_a_complete_group_that_is_lost_with_who_held_it_is_issued_again_as_often_as_need_be(
    tmp_path,
):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coordinator = Coordinator(plan_of(), ledger)
    reward_fn(coordinator, coordinator.issue_groups())

    for attempt in range(1, 5):
        coordinator.lose(2)
        assert coordinator.ready(0) is None and not coordinator.queue.holds(2)
        assert [(t.group_id, t.attempt) for t in coordinator.issue_groups()] == [(2, attempt)]
        coordinator.complete(2, 5)

    assert coordinator.ready(0) == (0, 1, 2, 3)
    with pytest.raises(CountsError, match="group 2 .* lost"):
        coordinator.lose(2)
    coordinator.release(0)
    ledger.close()
    assert verify(ledger.path) == coordinator.checked_counts()


def test_a_lost_group_does_not_start_again_on_an_engine_that_serves_older_weights():
    coordinator = Coordinator(plan_of())
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)
    coordinator.issue_groups()
    for number in range(4, 8):
        coordinator.retry(number)
    with pytest.raises(CountsError, match="version 0.*version 1"):
        coordinator.issue_groups(engine_version=0)
    assert [(t.group_id, t.version) for t in coordinator.issue_groups(engine_version=1)] == [
        (n, 1) for n in range(4, 8)
    ]


def test_a_version_ahead_of_the_steps_is_a_fault():
    coordinator = Coordinator(plan_of(max_staleness=2))
    coordinator.issue_groups(engine_version=1)  # sent, and not released yet
    with pytest.raises(CountsError, match="version 2.*step 1"):
        coordinator.issue_groups(engine_version=2)


def test_after_a_resume_an_engine_that_serves_the_initial_weights_is_found():
    coordinator = Coordinator(plan_of(max_staleness=2))
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)

    with pytest.raises(CountsError, match="version 0.*version 1"):
        Coordinator(plan_of(max_staleness=2), None, coordinator.snapshot()).issue_groups(
            engine_version=0
        )


def streaming(ledger=None, snapshot=None, **options):
    """Up to 12 groups at once, steps of 4."""
    return Coordinator(plan_of(max_staleness=2, **options), ledger, snapshot)


def test_a_process_that_is_killed_again_and_again_quarantines_nothing():
    coordinator = streaming(num_rows=100)
    for kills in range(5):
        prompt_groups = coordinator.issue_groups()
        assert [
            prompt_group.attempt for prompt_group in prompt_groups if prompt_group.group_id == 0
        ] == [kills]
        reward_fn(
            coordinator,
            [prompt_group for prompt_group in prompt_groups if prompt_group.group_id != 0],
        )
        coordinator.release(coordinator.step)
        coordinator = streaming(num_rows=100, snapshot=coordinator.snapshot())

    coordinator.issue_groups()
    assert coordinator.retry(0), "its own three attempts are all there"
    assert coordinator.checked_counts().dropped == {}


def test_groups_on_the_edge_go_on_in_another_folder(tmp_path):
    coordinator = streaming(Ledger(tmp_path / "old.jsonl"))
    coordinator.issue_groups()
    for number in range(6):
        coordinator.complete(number, 1)
    coordinator.release(0)
    ledger = Ledger(tmp_path / "new.jsonl", mark_of(coordinator.snapshot()))
    resumed = streaming(ledger, coordinator.snapshot())
    run_to_the_end(resumed)
    ledger.close()
    assert verify(ledger.path) == resumed.checked_counts() == GroupCounts(issued=20, consumed=20)


def test_groups_that_ran_start_again_no_faster_than_a_smaller_bound_allows():
    coordinator = streaming(num_rows=100)
    reward_fn(coordinator, coordinator.issue_groups()[:4])
    coordinator.release(0)
    resumed = Coordinator(plan_of(num_rows=100, batch=2), snapshot=coordinator.snapshot())

    seen = []
    for step in (1, 2, 3, 4):
        prompt_groups = resumed.issue_groups()
        assert [prompt_group.version for prompt_group in prompt_groups] == [step] * 2
        reward_fn(resumed, prompt_groups)
        seen += resumed.ready(step)
        resumed.release(step)

    assert seen == list(range(4, 12))


def test_draws_are_counted_for_the_steps_that_their_class_covers():
    """Staleness 1, steps of 4, at most 2 batches for each: 16 groups due by step 1, then 8 for each
    version."""
    plan = plan_of(num_rows=1000, max_staleness=1, max_num_gen_batches=2, when_exhausted="continue")
    coordinator = Coordinator(plan)

    issued = []
    for step in range(3):
        while prompt_groups := coordinator.issue_groups():
            issued += prompt_groups
            reward_fn(
                coordinator,
                prompt_groups,
                drop=[
                    prompt_group.group_id
                    for prompt_group in prompt_groups
                    if prompt_group.group_id % 8
                ],
            )

        assert coordinator.ready(step)
        coordinator.release(step)

    assert [prompt_group.version for prompt_group in issued] == [0] * 16 + [1] * 8 + [2] * 8


def test_exhausted_only_once_no_later_version_can_bring_room():
    coordinator = Coordinator(plan_of(num_rows=1000, max_staleness=1, max_num_gen_batches=1))
    first = coordinator.issue_groups()
    assert len(first) == 8
    reward_fn(coordinator, first, drop=range(4, 8))
    coordinator.release(0)
    assert coordinator.ready(1) is None, "nobody has asked for groups yet"
    assert coordinator.issue_groups(engine_version=0) == [] and coordinator.ready(1) is None, (
        "version 1 is on its way"
    )
    second = coordinator.issue_groups(engine_version=1)
    assert numbers_of(second) == [8, 9, 10, 11]
    reward_fn(coordinator, second[1:])
    assert coordinator.ready(1) is None, "one runs"
    coordinator.drop(8, "equal_rewards")
    coordinator.issue_groups(engine_version=1)

    with pytest.raises(
        Exhausted,
        match=r"8 drawn .* 3 are left .* 5 equal",
    ):
        coordinator.ready(1)


def test_weights_that_are_never_sent_again_are_a_fault_and_no_wait():
    coordinator = Coordinator(plan_of(num_rows=100, max_staleness=1))
    for step in range(2):
        reward_fn(coordinator, coordinator.issue_groups(engine_version=0))
        coordinator.release(step, sent_weights=False)

    assert coordinator.issue_groups(engine_version=0) == []
    with pytest.raises(CountsError, match="step 3.*version 0.*max_staleness is 1"):
        coordinator.ready(2)


def test_the_snapshot_is_the_cut_of_the_last_release():
    coordinator = Coordinator(plan_of())
    reward_fn(coordinator, coordinator.issue_groups(), drop=(1,))
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)
    at_release = json.loads(json.dumps(coordinator.snapshot()))
    reward_fn(coordinator, coordinator.issue_groups()[:2])
    assert coordinator.snapshot() == at_release
    resumed = Coordinator(plan_of(), snapshot=at_release)
    assert resumed.version == Version(1, 1)
    assert resumed.checked_counts() == GroupCounts(
        issued=5, consumed=4, dropped={"equal_rewards": 1}
    )
    assert numbers_of(resumed.issue_groups()) == [5, 6, 7, 8]


@pytest.mark.parametrize("kill_after", range(12))
def test_a_resumed_run_trains_what_the_uninterrupted_one_does(tmp_path, kill_after):
    """Killed after any number of waves, with groups in flight and queued: the same rows in the same
    steps, once."""

    def drop(prompt_group):
        return prompt_group.row % 3 == 1

    expected = run_to_the_end(Coordinator(plan_of(epochs=3)), drop)

    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    coordinator = Coordinator(plan_of(epochs=3), ledger)

    checkpoint = None
    steps = []
    for wave in range(kill_after):
        prompt_groups = coordinator.issue_groups()
        dropped = {prompt_group.group_id for prompt_group in prompt_groups if drop(prompt_group)}
        reward_fn(
            coordinator, prompt_groups if wave < kill_after - 1 else prompt_groups[:1], dropped
        )

        if coordinator.ready(coordinator.step) is not None:
            steps.append(coordinator.ready(coordinator.step))
            coordinator.release(coordinator.step)
            if len(steps) % 2 == 0:
                checkpoint = json.dumps([coordinator.snapshot(), steps])

    ledger.close()

    snapshot, steps = json.loads(checkpoint) if checkpoint else (None, [])
    ledger = Ledger(path, mark_of(snapshot) if snapshot else None)
    resumed = Coordinator(plan_of(epochs=3), ledger, snapshot)
    assert resumed.version == Version(1, len(steps))
    assert [tuple(step) for step in steps] + run_to_the_end(resumed, drop) == expected
    ledger.close()
    assert verify(path) == resumed.checked_counts()


def test_a_checkpoint_of_another_folder_goes_on_with_its_account(tmp_path):
    ledger = Ledger(tmp_path / "old.jsonl")
    coordinator = Coordinator(plan_of(), ledger)
    reward_fn(coordinator, coordinator.issue_groups(), drop=(0,))
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)
    snapshot = coordinator.snapshot()
    ledger.close()

    ledger = Ledger(tmp_path / "new.jsonl", mark_of(snapshot))
    resumed = Coordinator(plan_of(), ledger, snapshot)
    run_to_the_end(resumed)
    ledger.close()
    assert verify(ledger.path) == resumed.checked_counts()
    assert resumed.checked_counts() == GroupCounts(
        issued=20, consumed=19, dropped={"equal_rewards": 1}
    )


def test_more_epochs_may_be_asked_for_on_resume():
    coordinator = Coordinator(plan_of(num_rows=5, epochs=1))
    run_to_the_end(coordinator)
    assert Coordinator(plan_of(num_rows=5, epochs=1), snapshot=coordinator.snapshot()).finished
    resumed = Coordinator(plan_of(num_rows=5, epochs=2), snapshot=coordinator.snapshot())
    assert run_to_the_end(resumed) == [(5, 6, 7, 8)]
    assert resumed.finished, "three steps are all that two epochs of five rows have"


@pytest.mark.parametrize("change", [{"num_rows": 11}, {"seed": 2}, {"shuffle": False}])
def test_other_data_on_resume_are_refused(change):
    snapshot = Coordinator(plan_of()).snapshot()
    with pytest.raises(UserError, match=f"{next(iter(change))}=.*resume_mode"):
        Coordinator(plan_of(**change), snapshot=snapshot)


def test_a_ticket_that_is_not_running_is_named():
    coordinator = Coordinator(plan_of())
    reward_fn(coordinator, coordinator.issue_groups())
    coordinator.release(0)

    for wrong in (
        lambda: coordinator.complete(2, 1),
        lambda: coordinator.drop(2, "late"),
        lambda: coordinator.retry(2),
    ):
        with pytest.raises(CountsError, match="group 2 .* never issued"):
            wrong()
