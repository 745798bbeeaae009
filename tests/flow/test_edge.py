"""The experience edge: which tickets form a step, whatever the order of completion, and what it refuses."""

import itertools

import pytest

from distflow.flow.account import AccountingError
from distflow.flow.edge import Exhausted, ExperienceEdge
from distflow.flow.ticket import Ticket


def edge_with(num_tickets, **options):
    edge = ExperienceEdge(options.pop("consumer_batch", 2), **options)
    for number in range(num_tickets):
        edge.issue(Ticket(number, 0, number, 4, 0))
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
    edge = edge_with(3)
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
    edge = edge_with(6, consumer_batch=3, max_tickets=6, when_exhausted=when_exhausted)
    for number in range(6):
        if number < num_complete:
            edge.complete(number, 1)
        else:
            edge.drop(number, "too_few_verdicts" if number == 5 else "equal_rewards")
    return edge


def test_exhausted_tickets_are_an_error_that_says_why_and_what_to_do():
    with pytest.raises(Exhausted) as caught:
        exhausted_edge(2, "error").ready(0)
    for part in ("step 0", "3 prompt groups", "6 drawn", "2 are left", "3 equal_rewards, 1 too_few_verdicts",
                 "max_num_gen_batches", "when_exhausted=continue"):  # fmt: skip
        assert part in str(caught.value)


def test_exhausted_tickets_may_go_on_with_what_there_is():
    edge = exhausted_edge(2, "continue")
    assert edge.ready(0) == (0, 1)
    edge.release(0)
    assert edge.room(10) == 6


def test_going_on_with_nothing_is_an_error_too():
    with pytest.raises(Exhausted, match="none are left"):
        exhausted_edge(0, "continue").ready(0)


def test_room_counts_the_tickets_of_the_step():
    assert edge_with(4, max_tickets=6).room(10) == 2
    assert edge_with(4).room(10) == 10


@pytest.mark.parametrize(
    "wrong",
    [
        lambda edge: edge.issue(Ticket(1, 0, 1, 4, 0)),
        lambda edge: edge.complete(1, 5),
        lambda edge: edge.drop(1, "late"),
        lambda edge: edge.retry(1),
    ],
)
def test_a_complete_ticket_moves_only_to_its_step(wrong):
    edge = edge_with(2)
    edge.complete(1, 5)
    with pytest.raises(AccountingError, match="ticket 1 "):
        wrong(edge)


def test_a_lost_group_waits_and_is_no_longer_running():
    edge = edge_with(2)
    assert edge.retry(1)
    for wrong in (lambda: edge.complete(1, 5), lambda: edge.drop(1, "late"), lambda: edge.retry(1)):
        with pytest.raises(AccountingError, match="ticket 1 .* waits to be issued again"):
            wrong()
    assert edge.reissue(1, 3) == Ticket(1, 0, 1, 4, 3, attempt=1)
    assert edge.waiting == []
    edge.complete(1, 5)
    edge.complete(0, 5)
    assert edge.ready(0) == (0, 1)


def test_groups_left_behind_count_among_those_that_a_later_step_lacks():
    edge = edge_with(4, max_tickets=2)
    edge.drop(3, "of_the_step_before")
    for number in range(3):
        edge.complete(number, 1)
    edge.release(0)
    for number in (4, 5):
        edge.issue(Ticket(number, 0, number, 4, 0))
        edge.drop(number, "equal_rewards")
    with pytest.raises(Exhausted, match=r"of the 3 drawn for it 1 are left \(dropped: 2 equal_rewards\)"):
        edge.ready(1)


def test_unknown_tickets_and_steps_are_refused():
    edge = edge_with(1)
    with pytest.raises(AccountingError, match="ticket 9 "):
        edge.complete(9, 1)
    with pytest.raises(AccountingError, match="step 3 .* next one is 0"):
        edge.ready(3)
    with pytest.raises(AccountingError, match="step 0 .* before it was formed"):
        edge.release(0)


def test_the_choice_of_tickets_is_a_function():
    """What a rule for stale groups will replace: here, the newest complete ones."""

    def newest(groups, step, wanted):
        complete = [group.ticket.number for group in groups if group.complete]
        return tuple(complete[-wanted:]) if len(complete) >= wanted else None

    edge = edge_with(4, choose=newest)
    for number in (0, 1, 3):
        edge.complete(number, 1)
    assert edge.ready(0) == (1, 3)
    edge.complete(2, 1)
    assert edge.ready(0) == (1, 3), "a step once formed stays the same"
    edge.release(0)
    assert edge.ready(1) == (0, 2)
