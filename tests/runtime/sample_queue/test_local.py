"""The sample queue of one process: generation batches, shares, releases, and no waiting for a dead
thread."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.observe.writing.timing import Waits
from distflow.runtime.dp_groups import DpGroupShares
from distflow.runtime.rollout_loop.group import finished_group
from distflow.runtime.run_errors import Failure, NoProgress, UserNoProgress
from distflow.runtime.sample_queue.local import LocalSampleQueue
from distflow.runtime.sample_queue.protocol import DroppedGroup, Released, TrainingStep
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.group_states import CountsError, PromptGroup
from tests.runtime.groups import coordinator, group, samples

BROKEN = Failure("custom: KeyError: 'x' (at reward.py:3)", users=True)
LOST = Failure("node 'rollout' raised MemoryError", users=False)


class Driven:
    """A queue whose groups are handed out here, as the rollout loop would."""

    def __init__(self, num_ranks: int = 1, **changes: Any) -> None:
        self.coordinator: Coordinator = coordinator(**changes)
        self.waits: list[tuple[str, str, str]] = []
        told = Waits(lambda wait, ended: self.waits.append((wait.who, wait.what, wait.on)))
        self.queue = LocalSampleQueue(
            self.coordinator, told, [DpGroupShares(tuple(range(num_ranks)))]
        )

    def issue(self) -> list[PromptGroup]:
        return self.coordinator.issue_groups()

    def put(self, prompt_group: PromptGroup, batch: Batch | None = None, **metrics: float) -> None:
        batch = (
            group(prompt_group.group_id, version=prompt_group.version) if batch is None else batch
        )
        self.queue.end_groups(finished_group(prompt_group, batch, [(metrics, float(len(batch)))]))

    def drop(
        self,
        prompt_group: PromptGroup,
        reason: str,
        failure: Failure | None = None,
        lost: bool = False,
    ) -> None:
        self.queue.end_groups(DroppedGroup(prompt_group, reason, failure, lost))

    def fill(self) -> None:
        for prompt_group in self.issue():
            self.put(prompt_group)

    def fail_all(self, reason: str = "too_few_scores", failure: Failure | None = BROKEN) -> None:
        for prompt_group in self.issue():
            self.drop(prompt_group, reason, failure)


def on_thread(work: Callable[[], Any]) -> "tuple[threading.Thread, list[Any]]":
    """The work on a thread, and what becomes of it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as err:
            outcome.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def ended(thread: threading.Thread) -> bool:
    thread.join(60)
    return not thread.is_alive()


def rows(share: Any) -> list[int]:
    assert isinstance(share, TrainingStep)
    return share.batch["group_index"].tolist()


def test_a_step_is_taken_in_group_order_whatever_order_its_groups_end_in():
    driven = Driven()
    first, second = driven.issue()
    thread, outcome = on_thread(lambda: driven.queue.take(0, 0))
    driven.put(second)
    thread.join(0.05)
    assert thread.is_alive()
    driven.put(first)
    assert ended(thread) and outcome[0].group_ids == (0, 1) and rows(outcome[0]) == [0, 0, 1, 1]


def test_groups_are_handed_out_only_while_a_step_is_waited_for():
    """Nothing generates while the trainer updates, validates or saves."""

    async def run() -> None:
        driven = Driven()
        queue = driven.queue
        batches = driven.queue.prompt_groups(lambda: None)
        early = asyncio.ensure_future(anext(batches))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not early.done() and driven.coordinator.checked_counts().issued == 0
        taking = asyncio.ensure_future(asyncio.to_thread(queue.take, 0, 0))
        for prompt_group in await early:
            driven.put(prompt_group)
        assert rows(await taking) == [0, 0, 1, 1]
        queue.release(0, 0, sent_weights=True)
        second = asyncio.ensure_future(anext(batches))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not second.done(), "a validation may have the engine now"
        taking = asyncio.ensure_future(asyncio.to_thread(queue.take, 1, 0))
        assert [prompt_group.group_id for prompt_group in await second] == [2, 3]
        queue.fail(RuntimeError("end"))
        with pytest.raises(RuntimeError, match="end"):
            await taking
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    asyncio.run(run())


def test_with_staleness_groups_are_handed_out_before_any_step_is_waited_for():
    async def run() -> list[int]:
        batches = Driven(max_staleness=1).queue.prompt_groups(lambda: None)
        return [prompt_group.group_id for prompt_group in await anext(batches)]

    assert asyncio.run(run())


LENGTHS: Mapping[int, tuple[int, ...]] = {0: (20, 20), 1: (2, 2), 2: (9, 9), 3: (11, 11)}


def test_ranks_get_whole_groups_all_of_them_and_about_as_many_tokens():
    driven = Driven(num_ranks=2, consumer_batch=4)
    for prompt_group in driven.issue():
        driven.put(
            prompt_group,
            group(prompt_group.group_id, LENGTHS[prompt_group.group_id]),
            mine=float(prompt_group.group_id),
        )

    shares = [driven.queue.take(0, rank) for rank in (1, 0)]
    owned = [set(rows(share)) for share in shares]
    assert owned[0] | owned[1] == {0, 1, 2, 3} and not owned[0] & owned[1]

    for share in shares:
        assert (
            share is not None and share.group_ids == (0, 1, 2, 3) and share.metrics == {"mine": 1.5}
        )
        assert rows(share) == sorted(rows(share)) and all(
            rows(share).count(number) == 2 for number in rows(share)
        )

    sizes = [int(share.batch.lengths("response").sum()) for share in shares if share]
    assert max(sizes) - min(sizes) <= 8, (
        "{0, 1} and {2, 3}, not the first two and the rest by chance"
    )


def test_a_step_is_released_once_all_ranks_have_and_all_learn_how_the_run_stands():
    driven = Driven(num_ranks=2)
    driven.fill()
    for rank in (0, 1):
        assert driven.queue.take(0, rank) is not None
    first, outcome = on_thread(lambda: driven.queue.release(0, 0, True))
    first.join(0.05)
    assert first.is_alive() and driven.coordinator.step == 0
    other = driven.queue.release(0, 1, True)
    assert ended(first) and driven.coordinator.step == 1
    assert [(end.version, end.group_counts) for end in outcome] == [
        (other.version, other.group_counts)
    ]
    assert isinstance(other, Released) and other.version.step == 1 and not other.finished
    assert (
        other.group_counts.consumed == 2
        and driven.queue.resume_point().snapshot == driven.coordinator.snapshot()
    )
    assert ("training", "release of step 1", "other ranks") in driven.waits
    driven.fill()
    thread, outcome = on_thread(lambda: driven.queue.take(1, 0))
    assert ended(thread) and set(rows(driven.queue.take(1, 1))) | set(rows(outcome[0])) == {2, 3}
    thread, outcome = on_thread(lambda: driven.queue.release(1, 1, True))
    thread.join(0.05)
    assert thread.is_alive(), "the release of the step before is not this one's"
    assert driven.queue.release(1, 0, True).version.step == 2 and ended(thread)


def test_a_rank_that_is_gone_wakes_those_that_wait_for_it():
    driven = Driven(num_ranks=2)
    driven.fill()
    for rank in (0, 1):
        driven.queue.take(0, rank)
    thread, outcome = on_thread(lambda: driven.queue.release(0, 0, True))
    driven.queue.fail(RuntimeError("rank 1 is gone"))
    assert ended(thread) and str(outcome[0]) == "rank 1 is gone"


def test_a_group_that_is_lost_is_tried_three_times_then_dropped_after_max_retries():
    driven = Driven()
    first, second = driven.issue()
    driven.put(second)

    for attempt in range(3):
        assert (first.group_id, first.attempt) == (0, attempt)
        driven.drop(first, "error", LOST, lost=True)
        if attempt < 2:
            (first,) = driven.issue()

    (replacement,) = driven.issue()
    assert replacement.group_id == 2 and driven.coordinator.checked_counts().dropped == {
        "max_retries": 1
    }
    driven.put(replacement)
    assert rows(driven.queue.take(0, 0)) == [1, 1, 2, 2]


def test_what_fails_in_our_own_parts_ends_the_run_only_after_three_attempts():
    driven = Driven()
    for _ in range(2 * 3 - 1):  # two steps of groups
        for prompt_group in driven.issue():
            driven.drop(prompt_group, "error", LOST, lost=True)

    last = driven.issue()
    driven.drop(last[0], "error", LOST, lost=True)
    thread, outcome = on_thread(lambda: driven.queue.take(0, 0))
    thread.join(0.05)
    assert thread.is_alive()
    driven.drop(last[1], "error", LOST, lost=True)
    assert ended(thread) and type(outcome[0]) is NoProgress and "node 'rollout'" in str(outcome[0])


def test_groups_of_later_steps_are_in_the_checkpoint_and_go_on_from_it():
    changes: dict[str, Any] = {"max_staleness": 1, "max_concurrent": 4}
    driven = Driven(**changes)
    for prompt_group in driven.issue():
        driven.put(prompt_group, mine=float(prompt_group.group_id))
    assert rows(driven.queue.take(0, 0)) == [0, 0, 1, 1]
    driven.queue.release(0, 0, sent_weights=True)
    point = driven.queue.resume_point()
    assert [group.prompt_group.group_id for group in point.queued.values()] == [2, 3]
    sizes = [saved["num_tokens"] for saved in point.snapshot["live"]]
    assert sizes == [2 * 3 + 2 + 4] * 2, "of prompts and responses"
    resumed = Coordinator(driven.coordinator.plan, None, point.snapshot)
    share = LocalSampleQueue(resumed, Waits(), queued=point.queued).take(1, 0)
    assert rows(share) == [2, 2, 3, 3] and share is not None and share.metrics == {"mine": 2.5}


def test_groups_that_a_smaller_bound_made_stale_are_forgotten_with_their_batches():
    driven = Driven(max_staleness=1)
    driven.fill()
    driven.queue.take(0, 0)
    driven.queue.release(0, 0, sent_weights=True)
    plan = replace(driven.coordinator.plan, max_staleness=0)
    point = driven.queue.resume_point()
    resumed = Coordinator(plan, None, point.snapshot)
    queue = LocalSampleQueue(resumed, Waits(), queued=point.queued)
    assert resumed.checked_counts().dropped == {"stale": 2}
    for prompt_group in resumed.issue_groups():
        queue.end_groups(finished_group(prompt_group, group(prompt_group.group_id, version=1), []))
    assert rows(queue.take(1, 0)) == [4, 4, 5, 5]
    queue.release(1, 0, sent_weights=True)
    assert queue.resume_point().queued == {}


def test_the_lowest_version_of_any_token_is_told_to_the_ledger_s_keeper():
    driven = Driven(max_staleness=1, total_groups=100, total_steps=50)
    driven.fill()
    driven.queue.take(0, 0)
    driven.queue.release(0, 0, sent_weights=True)
    driven.queue.take(1, 0)
    driven.queue.release(1, 0, sent_weights=True)
    first, *others = driven.issue()
    assert first.version == 2
    versions = [0, 1, 2]
    tokens = Segment("policy", (5, 6, 7), (-1.0,) * 3, (-1.0,) * 3, tuple(versions))
    made = [
        replace(sample, segments=[sample.segments[0], tokens]) for sample in samples(first.group_id)
    ]
    driven.put(first, Batch.from_samples(made))
    for prompt_group in others:
        driven.put(prompt_group)

    with pytest.raises(CountsError, match=f"group {first.group_id} .* version 0, .* step 3 "):
        driven.queue.take(2, 0)


def test_a_failure_of_the_other_side_wakes_who_waits():
    driven = Driven()
    driven.issue()
    thread, outcome = on_thread(lambda: driven.queue.take(0, 0))
    driven.queue.fail(RuntimeError("gone"))
    assert ended(thread) and str(outcome[0]) == "gone"
    driven.queue.fail(RuntimeError("later"))
    with pytest.raises(RuntimeError, match="gone"):
        driven.queue.take(0, 0)


def test_a_failure_of_the_trainer_wakes_the_rollout_loop():
    async def run() -> None:
        driven = Driven()
        first = asyncio.ensure_future(anext(driven.queue.prompt_groups(lambda: None)))
        await asyncio.sleep(0)
        threading.Thread(target=driven.queue.fail, args=(RuntimeError("gone"),)).start()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(first, 10)
        assert driven.waits == [("rollout", "capacity", "training")]

    asyncio.run(run())


def test_two_steps_of_failures_in_a_row_end_the_run_with_advice():
    driven = Driven()
    driven.fail_all()
    thread, outcome = on_thread(lambda: driven.queue.take(0, 0))
    third, fourth = driven.issue()
    driven.drop(third, "too_few_scores", BROKEN)
    thread.join(0.05)
    assert thread.is_alive()
    driven.drop(fourth, "too_few_scores", BROKEN)
    assert (
        ended(thread)
        and isinstance(outcome[0], UserNoProgress)
        and isinstance(outcome[0], UserError)
    )
    message = str(outcome[0])
    assert "the last 4 prompt groups all failed" in message and "reward.py:3" in message
    assert "custom_reward_function.path" in message and "reward.timeout_s" not in message


def test_data_that_end_in_nothing_but_failures_are_no_success():
    driven = Driven(num_rows=2, total_groups=2, total_steps=1)
    driven.fail_all()
    with pytest.raises(UserNoProgress):
        driven.queue.take(0, 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_end_of_the_data_and_of_the_steps_is_none_for_every_rank(num_ranks):
    driven = Driven(num_ranks=num_ranks, total_steps=1)
    driven.fill()
    ranks = range(num_ranks)
    assert all(driven.queue.take(0, rank) is not None for rank in ranks)
    releases = [on_thread(lambda rank=rank: driven.queue.release(0, rank, True)) for rank in ranks]  # type: ignore[misc]
    assert all(ended(thread) and outcome[0].finished for thread, outcome in releases)
    assert [driven.queue.take(1, rank) for rank in ranks] == [None] * num_ranks
