"""The coordinator: waves of tickets, the end of the data, versions, resume, and what it refuses."""

import json

import pytest

from distflow.errors import UserError
from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_order import place, total_steps
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.groups import CountsError, GroupCounts, Version
from distflow.scheduling.ledger import Ledger, timeline, verify
from distflow.scheduling.sample_queue import Exhausted


def plan_of(num_rows=10, batch=4, epochs=2, **options):
    options = {"total_groups": epochs * num_rows, "total_steps": total_steps(epochs, num_rows, batch), **options}
    return DataPlan(num_rows=num_rows, consumer_batch=batch, group_size=8, **options)


def numbers_of(tickets):
    return [ticket.number for ticket in tickets]


def judge(coordinator, tickets, drop=()):
    for ticket in tickets:
        if ticket.number in drop:
            coordinator.drop(ticket.number, "equal_rewards")
        else:
            coordinator.complete(ticket.number, 5)


def run_to_the_end(coordinator, drop=lambda ticket: False):
    """Consumed tickets of each step, by the loop that a worker runs."""
    steps = []
    while not coordinator.finished:
        tickets = coordinator.take_groups()
        judge(coordinator, tickets, {ticket.number for ticket in tickets if drop(ticket)})
        if (numbers := coordinator.ready(coordinator.step)) is not None:
            coordinator.release(coordinator.step)
            steps.append(numbers)
        else:
            assert tickets, "no step is formed and nothing runs: stuck"
    return steps


def test_a_released_step_is_on_the_disk(tmp_path):
    class Synced(Ledger):
        def sync(self):
            super().sync()
            on_disk.append([record["kind"] for _, record in timeline(tmp_path / "ledger.jsonl")][-2:])

    on_disk = []
    coordinator = Coordinator(plan_of(), Synced(tmp_path / "ledger.jsonl"))
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    assert on_disk == [["consumed", "version"]]


def test_tickets_name_the_rows_of_the_epochs_in_order():
    plan = plan_of(seed=3)
    seen = []
    coordinator = Coordinator(plan)
    while not coordinator.finished:
        tickets = coordinator.take_groups()
        seen += tickets
        judge(coordinator, tickets)
        coordinator.release(coordinator.step)
    assert numbers_of(seen) == list(range(20))
    assert [(t.epoch, t.row) for t in seen] == [place(number, 10, 3, True) for number in range(20)]
    assert [t.version for t in seen] == [t.number // 4 for t in seen]
    assert {(t.group_size, t.attempt, t.stream) for t in seen} == {(8, 0, "train")}


def test_steps_cross_the_border_of_an_epoch_and_the_last_is_short():
    assert run_to_the_end(Coordinator(plan_of(num_rows=5, batch=4, epochs=2))) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9),
    ]


def test_drops_are_refilled_by_further_waves():
    coordinator = Coordinator(plan_of())
    first = coordinator.take_groups()
    assert numbers_of(first) == [0, 1, 2, 3]
    assert coordinator.take_groups() == []
    for number in (3, 1):
        coordinator.drop(number, "equal_rewards")
    coordinator.complete(0, 5)
    assert coordinator.take_groups() == [], "a wave opens only when the last one is wholly judged"
    coordinator.complete(2, 5)
    assert numbers_of(coordinator.take_groups()) == [4, 5]
    coordinator.complete(5, 5)
    assert coordinator.ready(0) is None
    coordinator.complete(4, 5)
    assert coordinator.ready(0) == (0, 2, 4, 5)
    assert coordinator.take_groups() == [], "the step is full"
    coordinator.release(0)
    assert numbers_of(coordinator.take_groups()) == [6, 7, 8, 9]


def test_waves_are_bounded_by_what_may_run_at_once():
    coordinator = Coordinator(plan_of(max_concurrent=3))
    assert numbers_of(coordinator.take_groups()) == [0, 1, 2]
    judge(coordinator, coordinator.take_groups())
    for number in range(3):
        coordinator.complete(number, 1)
    assert numbers_of(coordinator.take_groups()) == [3]


def test_an_engine_that_lags_gets_nothing_until_it_serves_the_new_version():
    coordinator = Coordinator(plan_of())
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    assert coordinator.take_groups(served_step=0) == []
    assert len(coordinator.take_groups(served_step=1)) == 4


def test_the_run_ends_after_its_steps_though_rows_are_left():
    coordinator = Coordinator(plan_of(total_steps=2, total_groups=1000))
    steps = run_to_the_end(coordinator, drop=lambda ticket: ticket.number % 3 == 0)
    assert [len(step) for step in steps] == [4, 4]
    assert coordinator.take_groups() == []


def test_the_run_ends_with_its_data_though_steps_are_left():
    coordinator = Coordinator(plan_of())
    steps = run_to_the_end(coordinator, drop=lambda ticket: ticket.number >= 8)
    assert steps == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert coordinator.accounting() == GroupCounts(issued=20, consumed=8, dropped={"equal_rewards": 12})


def test_exhausted_after_the_batches_that_a_step_may_draw():
    coordinator = Coordinator(plan_of(num_rows=100, max_num_gen_batches=2))
    drawn = 0
    while tickets := coordinator.take_groups():
        drawn += len(tickets)
        judge(coordinator, tickets, drop=range(1, 100))
        if drawn < 8:
            assert coordinator.ready(0) is None
    assert drawn == 8
    with pytest.raises(Exhausted, match="of the 8 drawn for it 1 are left"):
        coordinator.ready(0)


def test_going_on_when_exhausted_counts_the_short_step_as_full():
    plan = plan_of(num_rows=100, max_concurrent=64, max_num_gen_batches=1, when_exhausted="continue")
    coordinator = Coordinator(plan)
    judge(coordinator, coordinator.take_groups(), drop=(0, 1))
    assert coordinator.ready(0) == (2, 3)
    coordinator.release(0)
    judge(coordinator, coordinator.take_groups())
    assert coordinator.ready(1) == (4, 5, 6, 7)


def test_a_short_step_counts_as_full_without_a_bound_on_its_tickets_too():
    """What it lacked is no credit of the next step, which would then leave groups behind."""
    plan = plan_of(num_rows=6, batch=4, epochs=1, max_concurrent=64)
    coordinator = Coordinator(plan)
    assert run_to_the_end(coordinator) == [(0, 1, 2, 3), (4, 5)]
    longer = plan_of(num_rows=6, batch=4, epochs=3, max_concurrent=64)
    resumed = Coordinator(longer, snapshot=coordinator.snapshot())
    assert numbers_of(resumed.take_groups()) == [6, 7, 8, 9]


def test_every_consumed_step_ends_in_a_version_an_alias_where_nothing_was_sent(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coordinator = Coordinator(plan_of(), ledger)
    for step, published in enumerate((True, False, False, True)):
        judge(coordinator, coordinator.take_groups())
        assert coordinator.release(step, published) == Version(0, step + 1)
    ledger.close()
    versions = [(r["step"], r["weights"]) for _, r in timeline(ledger.path) if r["kind"] == "version"]
    assert versions == [(1, 1), (2, 1), (3, 1), (4, 4)]
    assert coordinator.weights_step == 4


def test_a_lost_group_has_three_attempts_under_one_ticket(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coordinator = Coordinator(plan_of(max_staleness=1, max_concurrent=8), ledger)
    first = coordinator.take_groups()[2]
    seen = [first]
    for _ in range(2):
        assert coordinator.retry(2), "it waits to be handed out again"
        seen += coordinator.take_groups()
    assert [(t.number, t.row, t.attempt) for t in seen] == [(2, first.row, n) for n in range(3)]
    assert not coordinator.retry(2), "it is dropped"
    assert coordinator.accounting() == GroupCounts(issued=8, running=7, dropped={"quarantined": 1})
    assert numbers_of(coordinator.take_groups()) == [8], "its credit is free"
    ledger.close()
    assert verify(ledger.path) == coordinator.accounting()


def test_a_complete_group_that_is_lost_with_who_held_it_is_issued_again_as_often_as_need_be(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coordinator = Coordinator(plan_of(), ledger)
    judge(coordinator, coordinator.take_groups())
    for attempt in range(1, 5):
        coordinator.lose(2)
        assert coordinator.ready(0) is None and not coordinator.holds(2)
        assert [(t.number, t.attempt) for t in coordinator.take_groups()] == [(2, attempt)]
        coordinator.complete(2, 5)
    assert coordinator.ready(0) == (0, 1, 2, 3)
    with pytest.raises(CountsError, match="ticket 2 cannot be lost: .* a step has taken it"):
        coordinator.lose(2)
    coordinator.release(0)
    ledger.close()
    assert verify(ledger.path) == coordinator.accounting()


def test_lost_groups_are_a_wave_of_their_own_before_any_new_one():
    coordinator = Coordinator(plan_of())
    coordinator.take_groups()
    coordinator.retry(3)
    coordinator.retry(1)
    coordinator.drop(0, "equal_rewards")
    assert coordinator.take_groups() == [], "the wave is not over yet: 2 runs"
    coordinator.complete(2, 5)
    assert [(t.number, t.attempt) for t in coordinator.take_groups()] == [(1, 1), (3, 1)]
    coordinator.complete(1, 5)
    assert coordinator.take_groups() == []
    coordinator.complete(3, 5)
    assert numbers_of(coordinator.take_groups()) == [4]


def test_a_lost_group_does_not_start_again_on_an_engine_that_serves_older_weights():
    coordinator = Coordinator(plan_of())
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    coordinator.take_groups()
    for number in range(4, 8):
        coordinator.retry(number)
    with pytest.raises(CountsError, match="serves version 0, but version 1 was served already"):
        coordinator.take_groups(served_step=0)
    assert [(t.number, t.version) for t in coordinator.take_groups(served_step=1)] == [(n, 1) for n in range(4, 8)]


def test_a_version_ahead_of_the_steps_is_a_fault():
    coordinator = Coordinator(plan_of(max_staleness=2))
    coordinator.take_groups(served_step=1)  # sent, and not released yet
    with pytest.raises(CountsError, match="serves version 2, .* step 0 is the next one"):
        coordinator.take_groups(served_step=2)


def test_after_a_resume_an_engine_that_serves_the_initial_weights_is_found():
    coordinator = Coordinator(plan_of(max_staleness=2))
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    with pytest.raises(CountsError, match="serves version 0, but version 1 was served already"):
        Coordinator(plan_of(max_staleness=2), None, coordinator.snapshot()).take_groups(served_step=0)


def test_as_many_run_at_once_as_staleness_allows_unless_less_is_asked_for():
    coordinator = Coordinator(plan_of(num_rows=100, max_staleness=3))
    assert numbers_of(coordinator.take_groups()) == list(range(16))
    assert numbers_of(Coordinator(plan_of(num_rows=100, max_staleness=3, max_concurrent=6)).take_groups()) == [
        *range(6)
    ]


def test_no_group_is_drawn_for_a_step_that_the_run_does_not_have():
    coordinator = Coordinator(plan_of(total_steps=2, max_staleness=3, max_concurrent=64))
    assert numbers_of(coordinator.take_groups()) == list(range(8))
    coordinator.drop(3, "equal_rewards")
    assert numbers_of(coordinator.take_groups()) == [8]


def streaming(ledger=None, snapshot=None, **options):
    """Up to 12 groups at once, steps of 4."""
    return Coordinator(plan_of(max_staleness=2, **options), ledger, snapshot)


def test_what_is_on_the_edge_at_a_release_is_in_the_cut_and_goes_on_from_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    coordinator = streaming(Ledger(path))
    tickets = coordinator.take_groups()
    assert numbers_of(tickets) == list(range(12))
    assert coordinator.retry(9)
    for number in (2, 3, 5, 7, 11):
        coordinator.complete(number, 10 + number)
    coordinator.release(0)
    snapshot = json.loads(json.dumps(coordinator.snapshot()))
    live = {group["ticket"]["number"]: group for group in snapshot["live"]}
    assert sorted(live) == [0, 1, 4, 6, 8, 9, 10, 11]
    assert live[11] == {
        "ticket": {"number": 11, "epoch": 1, "row": tickets[11].row, "group_size": 8, "version": 0, "attempt": 0,
                   "stream": "train", "position": 0},
        "complete": True, "num_tokens": 21, "failures": 0, "version": 0,
    }  # fmt: skip
    assert (live[9]["complete"], live[9]["failures"]) == (False, 1)
    coordinator.complete(0, 1)  # behind the cut: lost with the process

    ledger = Ledger(path, mark_of(snapshot))
    resumed = streaming(ledger, snapshot)
    assert resumed.accounting() == GroupCounts(issued=12, running=7, complete=1, consumed=4)
    again = resumed.take_groups()
    assert numbers_of(again) == [0, 1, 4, 6, 8, 9, 10, 12, 13, 14, 15], "the lost ones first, then as before"
    assert [t.attempt for t in again] == [1] * 7 + [0] * 4
    assert [t.row for t in again[:7]] == [tickets[number].row for number in numbers_of(again)[:7]]
    judge(resumed, again)
    assert resumed.ready(1) == (0, 1, 4, 11), "11 is due first: its ticket is of version 0, the others' are of 1"
    steps = run_to_the_end(resumed)
    assert sorted(number for step in steps for number in step) == [0, 1, 4, 6, *range(8, 20)]
    ledger.close()
    assert verify(path) == resumed.accounting() == GroupCounts(issued=20, consumed=20)


def test_a_process_that_is_killed_again_and_again_quarantines_nothing():
    coordinator = streaming(num_rows=100)
    for kills in range(5):
        tickets = coordinator.take_groups()
        assert [ticket.attempt for ticket in tickets if ticket.number == 0] == [kills]
        judge(coordinator, [ticket for ticket in tickets if ticket.number != 0])
        coordinator.release(coordinator.step)
        coordinator = streaming(num_rows=100, snapshot=coordinator.snapshot())
    coordinator.take_groups()
    assert coordinator.retry(0), "its own three attempts are all there"
    assert coordinator.accounting().dropped == {}


def test_failures_before_the_cut_still_count_behind_it():
    coordinator = streaming()
    tickets = coordinator.take_groups()
    for _ in range(2):
        coordinator.retry(0)
        coordinator.take_groups()
    judge(coordinator, tickets[1:])
    coordinator.release(0)
    resumed = streaming(snapshot=coordinator.snapshot())
    assert [t.attempt for t in resumed.take_groups() if t.number == 0] == [3]
    assert not resumed.retry(0)
    assert resumed.accounting().dropped == {"quarantined": 1}


def test_a_lost_group_that_no_step_is_left_for_does_not_start_again():
    coordinator = streaming(total_steps=2)
    judge(coordinator, coordinator.take_groups()[:4])
    coordinator.release(0)
    resumed = streaming(total_steps=1, snapshot=coordinator.snapshot())
    assert resumed.finished and resumed.take_groups() == []
    assert resumed.accounting() == GroupCounts(issued=8, running=4, consumed=4)


def test_groups_on_the_edge_go_on_in_another_folder(tmp_path):
    coordinator = streaming(Ledger(tmp_path / "old.jsonl"))
    coordinator.take_groups()
    for number in range(6):
        coordinator.complete(number, 1)
    coordinator.release(0)
    ledger = Ledger(tmp_path / "new.jsonl", mark_of(coordinator.snapshot()))
    resumed = streaming(ledger, coordinator.snapshot())
    run_to_the_end(resumed)
    ledger.close()
    assert verify(ledger.path) == resumed.accounting() == GroupCounts(issued=20, consumed=20)


def test_a_run_that_goes_on_with_less_staleness_drops_what_it_cannot_consume_in_time(tmp_path):
    path = tmp_path / "ledger.jsonl"
    coordinator = streaming(Ledger(path), num_rows=100)
    judge(coordinator, coordinator.take_groups())  # 0 to 11, of version 0
    coordinator.release(0)
    judge(coordinator, coordinator.take_groups()[:2])  # 12 and 13, of version 1, with 14 and 15
    coordinator.release(1)
    snapshot = coordinator.snapshot()
    assert [group["ticket"]["number"] for group in snapshot["live"]] == list(range(8, 16))
    ledger = Ledger(path, mark_of(snapshot))
    resumed = Coordinator(plan_of(num_rows=100, max_staleness=1), ledger, snapshot)
    assert resumed.accounting() == GroupCounts(issued=16, running=2, complete=2, consumed=8, dropped={"stale": 4}), (
        "8 to 11 are of version 0, which step 2 may not train on any more"
    )
    assert [number for number in range(16) if resumed.holds(number)] == [12, 13]
    again = resumed.take_groups()
    assert [(t.number, t.version) for t in again] == [(14, 2), (15, 2), *((n, 2) for n in range(16, 20))]
    judge(resumed, again)
    assert resumed.ready(2) == (12, 13, 14, 15)
    resumed.release(2)
    ledger.close()
    assert verify(path) == resumed.accounting()
    records = [r for _, r in timeline(path) if r["kind"] in ("plan", "dropped")]
    assert [(r["max_staleness"], r["consumer_batch"]) for r in records[:2]] == [(2, 4), (1, 4)]
    assert [(r["ticket"], r["reason"]) for r in records[2:]] == [(number, "stale") for number in range(8, 12)]


@pytest.mark.parametrize(("batch", "kept"), [(4, 8), (3, 6), (1, 2), (9, 8)])
def test_a_run_that_goes_on_with_smaller_steps_keeps_the_oldest_groups_that_fit(batch, kept):
    coordinator = streaming(num_rows=100)
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    resumed = streaming(num_rows=100, batch=batch, snapshot=coordinator.snapshot())
    assert [number for number in range(12) if resumed.holds(number)] == list(range(4, 4 + kept))
    run_to_the_end(resumed)


def test_groups_that_ran_start_again_no_faster_than_a_smaller_bound_allows():
    coordinator = streaming(num_rows=100)
    judge(coordinator, coordinator.take_groups()[:4])
    coordinator.release(0)
    resumed = Coordinator(plan_of(num_rows=100, batch=2), snapshot=coordinator.snapshot())
    seen = []
    for step in (1, 2, 3, 4):
        tickets = resumed.take_groups()
        assert [ticket.version for ticket in tickets] == [step] * 2
        judge(resumed, tickets)
        seen += resumed.ready(step)
        resumed.release(step)
    assert seen == list(range(4, 12))


def test_a_group_made_by_weights_that_are_too_old_is_not_trained():
    coordinator = streaming(num_rows=100)
    judge(coordinator, coordinator.take_groups())
    for step in range(2):
        coordinator.release(step)
        judge(coordinator, coordinator.take_groups())
    coordinator.release(2)
    ticket, *others = coordinator.take_groups()
    assert ticket.version == 3
    coordinator.complete(ticket.number, 5, version=0)
    judge(coordinator, others)
    with pytest.raises(CountsError, match=f"ticket {ticket.number} holds tokens of version 0, which step 3 may"):
        coordinator.ready(3)


def test_draws_are_counted_for_the_steps_that_their_class_covers():
    """Staleness 1, steps of 4, at most 2 batches for each: 16 tickets due by step 1, then 8 for each version."""
    plan = plan_of(num_rows=1000, max_staleness=1, max_num_gen_batches=2, when_exhausted="continue")
    coordinator = Coordinator(plan)
    issued = []
    for step in range(3):
        while tickets := coordinator.take_groups():
            issued += tickets
            judge(coordinator, tickets, drop=[ticket.number for ticket in tickets if ticket.number % 8])
        assert coordinator.ready(step)
        coordinator.release(step)
    assert [ticket.version for ticket in issued] == [0] * 16 + [1] * 8 + [2] * 8


def test_exhausted_only_once_no_later_version_can_bring_room():
    coordinator = Coordinator(plan_of(num_rows=1000, max_staleness=1, max_num_gen_batches=1))
    first = coordinator.take_groups()
    assert len(first) == 8
    judge(coordinator, first, drop=range(4, 8))
    coordinator.release(0)
    assert coordinator.ready(1) is None, "nobody has asked for tickets yet"
    assert coordinator.take_groups(served_step=0) == [] and coordinator.ready(1) is None, "version 1 is on its way"
    second = coordinator.take_groups(served_step=1)
    assert numbers_of(second) == [8, 9, 10, 11]
    judge(coordinator, second[1:])
    assert coordinator.ready(1) is None, "one runs"
    coordinator.drop(8, "equal_rewards")
    coordinator.take_groups(served_step=1)
    with pytest.raises(Exhausted, match=r"of the 8 drawn for it and those up to step 2 3 are left \(dropped: 5 equal"):
        coordinator.ready(1)


def test_exhausted_where_the_engine_keeps_its_weights():
    """Every second step is published: the version that is served is the last one before the next step."""
    coordinator = Coordinator(plan_of(num_rows=1000, max_staleness=1, max_num_gen_batches=1))
    judge(coordinator, coordinator.take_groups(), drop=range(4, 8))
    coordinator.release(0, published=False)
    assert coordinator.take_groups(served_step=0) == []
    with pytest.raises(Exhausted, match="of the 4 drawn for it none are left"):
        coordinator.ready(1)


def test_weights_that_are_never_sent_again_are_a_fault_and_no_wait():
    coordinator = Coordinator(plan_of(num_rows=100, max_staleness=1))
    for step in range(2):
        judge(coordinator, coordinator.take_groups(served_step=0))
        coordinator.release(step, published=False)
    assert coordinator.take_groups(served_step=0) == []
    with pytest.raises(CountsError, match="step 2 can get no groups: .* version 0, max_staleness is 1"):
        coordinator.ready(2)


def test_an_alias_opens_credits_as_a_version_that_was_sent_does():
    coordinator = Coordinator(plan_of(num_rows=1000))
    for step in range(3):
        tickets = coordinator.take_groups(served_step=step)
        assert [ticket.version for ticket in tickets] == [step] * 4
        judge(coordinator, tickets)
        coordinator.release(step, published=False)
    assert coordinator.weights_step == 0 and coordinator.version.step == 3


def test_the_snapshot_is_the_cut_of_the_last_release():
    coordinator = Coordinator(plan_of())
    judge(coordinator, coordinator.take_groups(), drop=(1,))
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    at_release = json.loads(json.dumps(coordinator.snapshot()))
    judge(coordinator, coordinator.take_groups()[:2])
    assert coordinator.snapshot() == at_release
    resumed = Coordinator(plan_of(), snapshot=at_release)
    assert resumed.version == Version(1, 1)
    assert resumed.accounting() == GroupCounts(issued=5, consumed=4, dropped={"equal_rewards": 1})
    assert numbers_of(resumed.take_groups()) == [5, 6, 7, 8]


@pytest.mark.parametrize("kill_after", range(12))
def test_a_resumed_run_trains_what_the_uninterrupted_one_does(tmp_path, kill_after):
    """Killed after any number of waves, with groups in flight and queued: the same rows in the same steps, once."""

    def drop(ticket):
        return ticket.row % 3 == 1

    expected = run_to_the_end(Coordinator(plan_of(epochs=3)), drop)

    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    coordinator = Coordinator(plan_of(epochs=3), ledger)
    checkpoint, steps = None, []
    for wave in range(kill_after):
        tickets = coordinator.take_groups()
        dropped = {ticket.number for ticket in tickets if drop(ticket)}
        judge(coordinator, tickets if wave < kill_after - 1 else tickets[:1], dropped)
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
    assert verify(path) == resumed.accounting()


def test_a_checkpoint_of_another_folder_goes_on_with_its_account(tmp_path):
    ledger = Ledger(tmp_path / "old.jsonl")
    coordinator = Coordinator(plan_of(), ledger)
    judge(coordinator, coordinator.take_groups(), drop=(0,))
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    snapshot = coordinator.snapshot()
    ledger.close()

    ledger = Ledger(tmp_path / "new.jsonl", mark_of(snapshot))
    resumed = Coordinator(plan_of(), ledger, snapshot)
    run_to_the_end(resumed)
    ledger.close()
    assert verify(ledger.path) == resumed.accounting()
    assert resumed.accounting() == GroupCounts(issued=20, consumed=19, dropped={"equal_rewards": 1})


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


def test_a_ledger_that_does_not_fit_the_snapshot_is_found(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coordinator = Coordinator(plan_of(), ledger)
    start = mark_of(coordinator.snapshot())
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    ledger.close()
    with pytest.raises(CountsError, match="the ledger counts .*issued=0.* the coordinator .*issued=4"):
        Coordinator(plan_of(), Ledger(ledger.path, start), coordinator.snapshot())


def test_a_ticket_that_is_not_running_is_named():
    coordinator = Coordinator(plan_of())
    judge(coordinator, coordinator.take_groups())
    coordinator.release(0)
    for wrong in (
        lambda: coordinator.complete(2, 1),
        lambda: coordinator.drop(2, "late"),
        lambda: coordinator.retry(2),
    ):
        with pytest.raises(CountsError, match="ticket 2 "):
            wrong()
