"""The sample queue: which groups form a step, whatever the order of completion, and what it
refuses."""

import itertools

import pytest

from distflow.scheduling.group_states import CountsError, PromptGroup
from distflow.scheduling.sample_queue import Exhausted, SampleQueue


def edge_with(num_tickets, **options):
    queue = SampleQueue(options.pop("consumer_batch", 2), **options)
    for number in range(num_tickets):
        queue.issue(PromptGroup(number, 0, number, 4, 0))
    return queue


def test_a_step_is_the_smallest_prefix_with_enough_survivors_in_any_order_of_events():
    for order in itertools.permutations(range(5)):
        queue = edge_with(5, consumer_batch=3)
        formed = None
        for number in order:
            if number in (0, 3):
                queue.drop(number, "equal_rewards")
            else:
                queue.complete(number, 10)
            assert formed is None or formed == queue.ready(0)
            formed = queue.ready(0)

        assert formed == (1, 2, 4)


def exhausted_edge(num_complete, when_exhausted):
    queue = edge_with(6, consumer_batch=3, when_exhausted=when_exhausted)
    for number in range(6):
        if number < num_complete:
            queue.complete(number, 1)
        else:
            queue.drop(number, "too_few_scores" if number == 5 else "equal_rewards")

    assert queue.ready(0) is None, "more may be drawn"
    return queue


def test_exhausted_tickets_are_an_error_that_says_why_and_what_to_do():
    with pytest.raises(Exhausted) as caught:
        exhausted_edge(2, "error").ready(0, exhausted=True)
    for part in ("step 1", "3 prompt groups", "6 drawn for it 2 are left", ("3 equal_rewards, 1 "
        "too_few_scores"),
                 "max_num_gen_batches", "when_exhausted=continue"):  # fmt: skip
        assert part in str(caught.value)


def test_exhausted_tickets_may_go_on_with_what_there_is():
    queue = exhausted_edge(2, "continue")
    assert queue.ready(0, exhausted=True) == (0, 1)
    queue.release(0)
    assert queue.next_step == 1


def test_going_on_with_nothing_is_an_error_too():
    with pytest.raises(Exhausted, match="step 1 .* 6 .* none"):
        exhausted_edge(0, "continue").ready(0, exhausted=True)


def test_what_runs_may_still_fill_the_step():
    queue = edge_with(3)
    queue.drop(2, "equal_rewards")
    assert queue.ready(0, exhausted=True) is None
    for number in (0, 1):
        queue.complete(number, 1)
    assert queue.ready(0, exhausted=True) == (0, 1)


def staggered(versions, **options):
    """An edge of steps of 2 at staleness 2, a group for each version."""
    queue = SampleQueue(2, max_staleness=2, **options)
    for number, version in enumerate(versions):
        queue.issue(PromptGroup(number, 0, number, 4, version))
    return queue


def complete(queue, *numbers):
    for number in numbers:
        queue.complete(number, 1)


def test_a_step_takes_what_is_due_first_then_the_older_ticket():
    queue = staggered([1, 0, 1, 0], next_step=1)
    complete(queue, 0, 2, 3)
    assert queue.ready(1) == (0, 3), "group 3 is due first"


def test_a_step_that_leaves_what_later_steps_can_still_take_does_not_wait_for_stragglers():
    queue = staggered([0] * 6)
    complete(queue, 4, 5)
    assert queue.release(0), "steps 1 and 2 can take the four that run"
    complete(queue, 3)
    assert queue.ready(1) is None
    complete(queue, 2)
    assert queue.release(1), "step 2 can take the two that run"

    for number in (0, 1):
        assert queue.ready(2) is None
        complete(queue, number)

    assert queue.ready(2) == (0, 1)


def test_a_step_waits_for_what_no_later_step_could_take():
    queue = staggered([0, 0, 0, 1, 1], next_step=2)
    complete(queue, 3, 4)
    assert queue.ready(2) is None, "three are due now"
    queue.drop(0, "error")
    assert queue.ready(2) is None
    complete(queue, 1)
    assert queue.ready(2) is None
    complete(queue, 2)
    assert queue.ready(2) == (1, 2)


def test_a_group_that_waits_to_start_again_holds_up_no_step():
    queue = staggered([0, 0, 0], next_step=2)
    complete(queue, 1, 2)
    assert queue.ready(2) is None
    queue.retry(0)
    assert queue.release(2)
    assert queue.reissue(0, 3).version == 3


def test_more_than_can_be_consumed_in_time_is_a_fault_and_no_wait():
    queue = staggered([0, 0, 0], next_step=2)
    complete(queue, 0, 1, 2)
    with pytest.raises(CountsError, match="step 3 .* 1 groups .*step 3.* is 0"):
        queue.ready(2)


@pytest.mark.parametrize("version", [0, 4])
def test_tokens_of_weights_that_the_step_may_not_train_on_are_a_fault(version):
    """An engine that lags behind what it says that it serves, or runs ahead."""
    queue = staggered([2, 3], next_step=3)
    queue.complete(0, 1, version)
    queue.complete(1, 1)

    with pytest.raises(CountsError, match=f"group 0 .* version {version}, .*step 4"):
        queue.ready(3)


def test_an_older_token_makes_a_group_due_earlier():
    queue = staggered([2, 2, 2], next_step=3)
    complete(queue, 0, 1)
    queue.complete(2, 1, 1)
    assert queue.ready(3) == (0, 2)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda queue: queue.issue(PromptGroup(1, 0, 1, 4, 0)), "issued twice"),
        (lambda queue: queue.complete(1, 5), "cannot complete"),
        (lambda queue: queue.drop(1, "late"), "cannot be dropped"),
        (lambda queue: queue.retry(1), "cannot be tried"),
    ],
)
def test_a_complete_ticket_moves_only_to_its_step(wrong, what):
    queue = edge_with(2)
    queue.complete(1, 5)
    with pytest.raises(CountsError, match=f"group 1 .*{what}"):
        wrong(queue)


def test_a_lost_group_waits_and_is_no_longer_running():
    queue = edge_with(2)
    assert queue.retry(1)

    for wrong in (
        lambda: queue.complete(1, 5),
        lambda: queue.drop(1, "late"),
        lambda: queue.retry(1),
    ):
        with pytest.raises(CountsError, match="group 1 .* waits"):
            wrong()

    assert queue.num_waiting == 1
    assert queue.reissue(1, 0) == PromptGroup(1, 0, 1, 4, 0, attempt=1)
    assert queue.waiting == []
    queue.complete(1, 5)
    queue.complete(0, 5)
    assert queue.ready(0) == (0, 1)


def test_groups_left_behind_count_among_those_that_a_later_step_lacks():
    queue = edge_with(3, max_staleness=1)
    for number in range(3):
        queue.complete(number, 1)
    queue.release(0)

    for number in (3, 4):
        queue.issue(PromptGroup(number, 0, number, 4, 1))
        queue.drop(number, "equal_rewards")

    wanted = r"step 2 .* 3 drawn .* 1 are left \(dropped: 2 equal_rewards\)"
    with pytest.raises(Exhausted, match=wanted):
        queue.ready(1, exhausted=True)


def test_unknown_tickets_and_steps_are_refused():
    queue = edge_with(1)
    with pytest.raises(CountsError, match="group 9 cannot complete"):
        queue.complete(9, 1)
    with pytest.raises(CountsError, match="step 4 .* 1$"):
        queue.ready(3)
    with pytest.raises(CountsError, match="step 1 .*released"):
        queue.release(0)
