"""The experience edge between two threads: nobody waits for one that is gone, and failure of everything ends it."""

import asyncio
import threading
from typing import Any

import pytest
from distflow.runtime.local_edge import Failure, LocalEdge, NoProgress, UserNoProgress

from distflow.config.errors import UserError
from distflow.flow.edge import Exhausted
from distflow.flow.ticket import Ticket
from tests.runtime.groups import coordinator, group

BROKEN = Failure("custom: KeyError: 'x' (at reward.py:3)", users=True)


class Told(list[tuple[int, str]]):
    def __call__(self, ticket: Ticket, outcome: str, started: float, ended: float) -> None:
        self.append((ticket.number, outcome))


def edge_of(**changes: Any) -> LocalEdge:
    return LocalEdge(coordinator(**changes), Told())


def issue(edge: LocalEdge) -> list[Ticket]:
    return edge.coordinator.take_tickets()


def taking(edge: LocalEdge, step: int = 0) -> "tuple[threading.Thread, list[Any]]":
    """`take` on a thread, and what becomes of it."""
    outcome: list[Any] = []

    def take() -> None:
        try:
            outcome.append(edge.take(step))
        except BaseException as err:
            outcome.append(err)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, outcome


def test_a_step_is_taken_in_ticket_order_whatever_order_its_groups_end_in() -> None:
    edge = edge_of()
    first, second = issue(edge)
    thread, outcome = taking(edge)
    edge.put(second, group(1), 0.0)
    assert thread.is_alive()
    edge.put(first, group(0), 0.0)
    thread.join(10)
    assert outcome[0]["group_index"].tolist() == [0, 0, 1, 1]


def test_a_failure_of_the_other_side_wakes_who_waits() -> None:
    edge = edge_of()
    issue(edge)
    thread, outcome = taking(edge)
    edge.fail(RuntimeError("gone"))
    thread.join(10)
    assert str(outcome[0]) == "gone"
    with pytest.raises(RuntimeError, match="gone"):
        edge.take(0)
    edge.fail(RuntimeError("later"))
    with pytest.raises(RuntimeError, match="gone"):
        edge.take(0)


def test_two_steps_of_failures_in_a_row_end_the_run_with_advice() -> None:
    edge = edge_of()
    for ticket in issue(edge):
        edge.drop(ticket, "too_few_verdicts", 0.0, BROKEN)
    thread, outcome = taking(edge)
    third, fourth = issue(edge)
    edge.drop(third, "too_few_verdicts", 0.0, BROKEN)
    assert thread.is_alive()
    edge.drop(fourth, "too_few_verdicts", 0.0, BROKEN)
    thread.join(10)
    assert isinstance(outcome[0], UserNoProgress) and isinstance(outcome[0], UserError)
    message = str(outcome[0])
    assert "the last 4 prompt groups all failed" in message and "reward.py:3" in message
    assert "custom_reward_function.path" in message and "reward.timeout_s" in message


def test_a_group_that_comes_through_starts_the_count_anew_and_a_filtered_one_too() -> None:
    edge = edge_of()
    for _ in range(3):
        first, second = issue(edge)
        edge.drop(first, "error", 0.0, Failure("engine", users=False))
        edge.drop(second, "all_equal", 0.0)
    third, fourth = issue(edge)
    edge.drop(third, "error", 0.0, Failure("engine", users=False))
    edge.put(fourth, group(fourth.number), 0.0)
    assert edge.take(0) is not None


def test_what_fails_in_our_own_parts_is_no_fault_of_the_user() -> None:
    edge = edge_of()
    for _ in range(2):
        for ticket in issue(edge):
            edge.drop(ticket, "error", 0.0, Failure("node 'rollout' raised MemoryError", users=False))
    with pytest.raises(NoProgress, match="node 'rollout'") as caught:
        edge.take(0)
    assert not isinstance(caught.value, UserError)


def test_data_that_end_in_nothing_but_failures_are_no_success() -> None:
    edge = edge_of(num_rows=2, total_tickets=2, total_steps=1)
    for ticket in issue(edge):
        edge.drop(ticket, "too_few_verdicts", 0.0, BROKEN)
    with pytest.raises(UserNoProgress):
        edge.take(0)


def test_failures_are_told_before_exhaustion() -> None:
    edge = edge_of(max_num_gen_batches=1)
    for ticket in issue(edge):
        edge.drop(ticket, "too_few_verdicts", 0.0, BROKEN)
    with pytest.raises(UserNoProgress):
        edge.take(0)
    edge = edge_of(max_num_gen_batches=1)
    for ticket in issue(edge):
        edge.drop(ticket, "all_equal", 0.0)
    with pytest.raises(Exhausted):
        edge.take(0)


def test_groups_of_one_without_a_verdict_are_trained_masked_but_not_for_ever() -> None:
    """PPO has groups of one: nothing drops them, and a reward that is down would go unnoticed."""
    edge = edge_of()
    for step in range(2):
        for ticket in issue(edge):
            batch = group(ticket.number, (3,), valid=(False,))
            batch["reward_errors"] = ["custom: ConnectionError: refused"]
            edge.put(ticket, batch, 0.0)
        if step == 0:
            assert edge.take(0) is not None
            edge.release(0, published=True)
            edge.go_on()
    with pytest.raises(UserNoProgress, match="ConnectionError"):
        edge.take(1)


def test_the_end_of_the_data_and_of_the_steps_is_none() -> None:
    edge = edge_of(total_steps=1)
    for ticket in issue(edge):
        edge.put(ticket, group(ticket.number), 0.0)
    assert edge.take(0) is not None
    edge.release(0, published=True)
    assert edge.take(1) is None


def test_waves_wait_until_the_learner_goes_on() -> None:
    async def run() -> list[list[int]]:
        edge, seen = edge_of(), []
        waves = edge.waves()
        first = await anext(waves)
        seen.append([t.number for t in first])
        for ticket in first:
            edge.put(ticket, group(ticket.number), 0.0)
        second = asyncio.ensure_future(anext(waves))
        await asyncio.sleep(0)
        assert edge.take(0) is not None
        edge.release(0, published=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not second.done(), "a validation may have the engine now"
        threading.Thread(target=edge.go_on).start()
        seen.append([t.number for t in await second])
        edge.fail(RuntimeError("end"))
        with pytest.raises(StopAsyncIteration):
            await anext(waves)
        return seen

    assert asyncio.run(run()) == [[0, 1], [2, 3]]


def test_every_end_of_a_group_is_told_with_its_reason() -> None:
    edge = edge_of()
    first, second = issue(edge)
    edge.put(first, group(0), 0.0)
    edge.drop(second, "too_few_verdicts", 0.0, BROKEN)
    assert edge._on_group == [(0, "complete"), (1, f"too_few_verdicts: {BROKEN.message}")]
