"""The experience edge: which tickets form a step, whatever the order of completion, and what it refuses."""

import itertools

import pytest

from distflow.scheduling.groups import CountsError, PromptGroup
from distflow.scheduling.sample_queue import Exhausted, SampleQueue


def edge_with(num_tickets, **options):
    edge = SampleQueue(options.pop("consumer_batch", 2), **options)
    for number in range(num_tickets):
        edge.issue(PromptGroup(number, 0, number, 4, 0))
    return edge


def test_a_step_is_the_smallest_prefix_with_enough_survivors_in_any_order_of_events():
    for order in itertools.permutations(range(5)):
        edge = edge_with(5, consumer_batch=3)
        formed = None
        for number in order:
            if number in (0, 3):
                edge.drop(number, "equal_rewards")
            else:
                edge.complete(number, 10)
            assert formed is None or formed == edge.ready(0)
            formed = edge.ready(0)
        assert formed == (1, 2, 4)


def test_a_later_group_never_takes_the_place_of_one_that_still_runs():
    edge = edge_with(3)
    edge.complete(1, 10)
    edge.complete(2, 10)
    assert edge.ready(0) is None
    edge.drop(0, "error")
    assert edge.ready(0) == (1, 2)


def test_release_empties_the_edge_and_moves_to_the_next_step():
    edge = edge_with(3, max_staleness=1)
    for number in range(3):
        edge.complete(number, 10 + number)
    groups = edge.release(0)
    assert [(group.ticket.number, group.num_tokens) for group in groups] == [(0, 10), (1, 11)]
    assert [group.ticket.number for group in edge.live] == [2]
    assert (edge.num_complete, edge.next_step) == (1, 1)
    assert edge.ready(1) is None


def test_the_last_step_may_be_short():
    edge = edge_with(2, consumer_batch=4)
    edge.complete(0, 1)
    edge.close()
    assert edge.ready(0) is None
    edge.drop(1, "error")
    assert edge.ready(0) == (0,)


def test_nothing_left_at_the_end_of_the_data_is_no_step():
    edge = edge_with(1)
    edge.close()
    edge.drop(0, "error")
    assert edge.ready(0) is None and not edge.live


def exhausted_edge(num_complete, when_exhausted):
    edge = edge_with(6, consumer_batch=3, when_exhausted=when_exhausted)
    for number in range(6):
        if number < num_complete:
            edge.complete(number, 1)
        else:
            edge.drop(number, "too_few_verdicts" if number == 5 else "equal_rewards")
    assert edge.ready(0) is None, "more may be drawn"
    return edge


def test_exhausted_tickets_are_an_error_that_says_why_and_what_to_do():
    with pytest.raises(Exhausted) as caught:
        exhausted_edge(2, "error").ready(0, exhausted=True)
    for part in ("step 0", "3 prompt groups", "6 drawn for it 2 are left", "3 equal_rewards, 1 too_few_verdicts",
                 "max_num_gen_batches", "when_exhausted=continue"):  # fmt: skip
        assert part in str(caught.value)


def test_exhausted_tickets_may_go_on_with_what_there_is():
    edge = exhausted_edge(2, "continue")
    assert edge.ready(0, exhausted=True) == (0, 1)
    edge.release(0)
    assert edge.next_step == 1


def test_going_on_with_nothing_is_an_error_too():
    with pytest.raises(Exhausted, match="none are left"):
        exhausted_edge(0, "continue").ready(0, exhausted=True)


def test_what_runs_may_still_fill_the_step():
    edge = edge_with(3)
    edge.drop(2, "equal_rewards")
    assert edge.ready(0, exhausted=True) is None
    for number in (0, 1):
        edge.complete(number, 1)
    assert edge.ready(0, exhausted=True) == (0, 1)


def staggered(versions, **options):
    """An edge of steps of 2 at staleness 2, a group for each version."""
    edge = SampleQueue(2, max_staleness=2, **options)
    for number, version in enumerate(versions):
        edge.issue(PromptGroup(number, 0, number, 4, version))
    return edge


def complete(edge, *numbers):
    for number in numbers:
        edge.complete(number, 1)


def test_a_step_takes_what_is_due_first_then_the_older_ticket():
    edge = staggered([1, 0, 1, 0], next_step=1)
    complete(edge, 0, 2, 3)
    assert edge.ready(1) == (0, 3), "ticket 3 is due first"


def test_a_step_that_leaves_what_later_steps_can_still_take_does_not_wait_for_stragglers():
    edge = staggered([0] * 6)
    complete(edge, 4, 5)
    assert edge.release(0), "steps 1 and 2 can take the four that run"
    complete(edge, 3)
    assert edge.ready(1) is None
    complete(edge, 2)
    assert edge.release(1), "step 2 can take the two that run"
    for number in (0, 1):
        assert edge.ready(2) is None
        complete(edge, number)
    assert edge.ready(2) == (0, 1)


def test_a_step_waits_for_what_no_later_step_could_take():
    edge = staggered([0, 0, 0, 1, 1], next_step=2)
    complete(edge, 3, 4)
    assert edge.ready(2) is None, "three are due now"
    edge.drop(0, "error")
    assert edge.ready(2) is None
    complete(edge, 1)
    assert edge.ready(2) is None
    complete(edge, 2)
    assert edge.ready(2) == (1, 2)


def test_a_group_that_waits_to_start_again_holds_up_no_step():
    edge = staggered([0, 0, 0], next_step=2)
    complete(edge, 1, 2)
    assert edge.ready(2) is None
    edge.retry(0)
    assert edge.release(2)
    assert edge.reissue(0, 3).version == 3


def test_more_than_can_be_consumed_in_time_is_a_fault_and_no_wait():
    edge = staggered([0, 0, 0], next_step=2)
    complete(edge, 0, 1, 2)
    with pytest.raises(CountsError, match="step 2 would leave 1 groups that are due by step 2.* ticket 0"):
        edge.ready(2)


@pytest.mark.parametrize("version", [0, 4])
def test_tokens_of_weights_that_the_step_may_not_train_on_are_a_fault(version):
    """An engine that lags behind what it says that it serves, or runs ahead."""
    edge = staggered([2, 3], next_step=3)
    edge.complete(0, 1, version)
    edge.complete(1, 1)
    with pytest.raises(CountsError, match=f"ticket 0 holds tokens of version {version}, which step 3 may not"):
        edge.ready(3)


def test_an_older_token_makes_a_group_due_earlier():
    edge = staggered([2, 2, 2], next_step=3)
    complete(edge, 0, 1)
    edge.complete(2, 1, 1)
    assert edge.ready(3) == (0, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda edge: edge.issue(PromptGroup(1, 0, 1, 4, 0)),
        lambda edge: edge.complete(1, 5),
        lambda edge: edge.drop(1, "late"),
        lambda edge: edge.retry(1),
    ],
)
def test_a_complete_ticket_moves_only_to_its_step(wrong):
    edge = edge_with(2)
    edge.complete(1, 5)
    with pytest.raises(CountsError, match="ticket 1 "):
        wrong(edge)


def test_a_lost_group_waits_and_is_no_longer_running():
    edge = edge_with(2)
    assert edge.retry(1)
    for wrong in (lambda: edge.complete(1, 5), lambda: edge.drop(1, "late"), lambda: edge.retry(1)):
        with pytest.raises(CountsError, match="ticket 1 .* waits to be issued again"):
            wrong()
    assert edge.num_waiting == 1
    assert edge.reissue(1, 0) == PromptGroup(1, 0, 1, 4, 0, attempt=1)
    assert edge.waiting == []
    edge.complete(1, 5)
    edge.complete(0, 5)
    assert edge.ready(0) == (0, 1)


def test_groups_left_behind_count_among_those_that_a_later_step_lacks():
    edge = edge_with(3, max_staleness=1)
    for number in range(3):
        edge.complete(number, 1)
    edge.release(0)
    for number in (3, 4):
        edge.issue(PromptGroup(number, 0, number, 4, 1))
        edge.drop(number, "equal_rewards")
    wanted = r"of the 3 drawn for it and those up to step 2 1 are left \(dropped: 2 equal_rewards\)"
    with pytest.raises(Exhausted, match=wanted):
        edge.ready(1, exhausted=True)


def test_unknown_tickets_and_steps_are_refused():
    edge = edge_with(1)
    with pytest.raises(CountsError, match="ticket 9 "):
        edge.complete(9, 1)
    with pytest.raises(CountsError, match="step 3 .* next one is 0"):
        edge.ready(3)
    with pytest.raises(CountsError, match="step 0 .* before it was formed"):
        edge.release(0)
