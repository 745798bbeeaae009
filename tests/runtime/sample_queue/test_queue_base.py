"""The queue of several dp groups and workers: the shares of a step, its release, and workers that
leave and come."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distflow.observe.writing.timing import Waits
from distflow.runtime.dp_groups import DpGroupShares
from distflow.runtime.sample_queue.protocol import (
    DroppedGroup,
    FinishedGroup,
    NewWorkers,
    TrainingStep,
)
from distflow.runtime.sample_queue.queue_base import SharedSampleQueue
from distflow.scheduling.data_plan import minibatches
from distflow.scheduling.group_states import PromptGroup
from tests.runtime.groups import coordinator

TOKENS = (40, 10, 30, 20, 25, 5)


def queue(*dp_groups: DpGroupShares) -> SharedSampleQueue[str]:
    counted = coordinator(consumer_batch=len(TOKENS))
    made = SharedSampleQueue[str](counted, Waits(), dp_groups)

    for prompt_group in counted.issue_groups():
        group_id = prompt_group.group_id
        made.end_groups(
            FinishedGroup(prompt_group, f"group {group_id}", TOKENS[group_id], version=0)
        )

    return made


def taken(shared: SharedSampleQueue[str], rank: int) -> list[int]:
    part = shared.take_step(0, rank)
    assert isinstance(part, TrainingStep) and part.group_ids == tuple(range(len(TOKENS)))
    return [int(group.split()[1]) for group in part.batch]


def test_ranks_that_compute_layers_together_take_the_same_share_and_release_together():
    shared = queue(DpGroupShares((0, 0, 1, 1)))
    shares = [taken(shared, rank) for rank in range(4)]
    assert shares[0] == shares[1] and shares[2] == shares[3]
    assert sorted(shares[0] + shares[2]) == list(range(len(TOKENS)))
    released: list[int] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: released.append(shared.release(0, rank, True).version.step)
        )
        for rank in range(4)
    ]
    for thread in threads[:3]:
        thread.start()
    threads[0].join(0.2)
    assert released == []
    threads[3].start()
    for thread in threads:
        thread.join(60)
    assert released == [1] * 4


def test_every_team_has_the_whole_step_and_divides_its_own_mini_batches():
    shared = queue(DpGroupShares((0, 1), mini_batch=2, seed=7), DpGroupShares((0,)))
    first, second, alone = (taken(shared, rank) for rank in range(3))
    assert sorted(first + second) == alone == list(range(len(TOKENS)))
    for mini_batch in minibatches(len(TOKENS), range(len(TOKENS)), 2, 7, 0, 0):
        assert [len(set(mini_batch) & set(share)) for share in (first, second)] == [1, 1]


class Shared:
    """A queue without generation batches, with two workers."""

    def __init__(self, num_ranks: int = 1, may_be_lost: bool = False, **changes: Any) -> None:
        self.coordinator = coordinator(max_staleness=1, **changes)
        dp_groups = (DpGroupShares(tuple(range(num_ranks))),)
        self.queue = SharedSampleQueue[PromptGroup](
            self.coordinator, Waits(), dp_groups, ("0", "1"), may_be_lost=may_be_lost
        )

    def prompt_groups(self, worker: int, engine_version: int = 0) -> list[PromptGroup]:
        found = self.queue.groups_for(worker, engine_version)
        assert found is not None
        return found

    def put(self, prompt_group: PromptGroup) -> None:
        self.queue.end_groups(FinishedGroup(prompt_group, prompt_group, 5))

    def part(self, rank: int) -> "TrainingStep[Sequence[PromptGroup]]":
        found = self.queue.take_step(0, rank)
        assert isinstance(found, TrainingStep)
        return found

    def told(self, lost: list[list[int]]) -> list[bool]:
        """What each rank hears that tells what it has lost."""
        return self.from_ranks(lambda rank: self.queue.read(0, rank, lost[rank]))

    @staticmethod
    def from_ranks(call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(call, (0, 1)))


def test_groups_of_a_worker_that_is_gone_go_to_others_and_what_still_comes_of_it_is_passed_over():
    shared = Shared()
    theirs = shared.prompt_groups(0)
    ours = shared.prompt_groups(1)
    shared.put(theirs[0])
    assert shared.queue.lose_worker(0) == len(theirs), "running ones, and what it had made"
    again = shared.prompt_groups(1)
    assert {prompt_group.group_id for prompt_group in again} >= {
        prompt_group.group_id for prompt_group in theirs
    }
    before = shared.coordinator.checked_counts()
    shared.put(theirs[1])
    shared.queue.end_groups(DroppedGroup(theirs[-1], "error"))
    assert shared.coordinator.checked_counts() == before, "it comes too late"
    for prompt_group in [*ours, *again]:
        shared.put(prompt_group)
    assert shared.queue.groups_for(0, 0) is None, "it is told to end"
    assert {prompt_group.attempt for prompt_group in shared.part(0).batch} == {0, 1}


def test_a_step_of_which_a_group_is_lost_before_all_ranks_have_read_it_is_formed_again():
    """By one rank, while the other has read all of its own."""
    shared = Shared(num_ranks=2, may_be_lost=True)
    for worker in (0, 1):
        for prompt_group in shared.prompt_groups(worker):
            shared.put(prompt_group)

    before = shared.coordinator.checked_counts()
    parts = [shared.part(rank) for rank in (0, 1)]
    lost = parts[1].own[0]
    assert shared.told([[], [lost]]) == [False, False]

    # whoever held it is gone; groups of the step that lie with it are lost with the others
    shared.queue.lose_worker(0)
    again = shared.prompt_groups(1)
    assert (lost, 1) in {(prompt_group.group_id, prompt_group.attempt) for prompt_group in again}
    for prompt_group in again:
        shared.put(prompt_group)
    parts = [shared.part(rank) for rank in (0, 1)]
    assert lost in {number for part in parts for number in part.own}
    assert shared.told([[], []]) == [True, True]
    assert shared.coordinator.checked_counts().issued >= before.issued
    ends = shared.from_ranks(lambda rank: shared.queue.release(0, rank, True).group_counts.consumed)
    assert ends == [len(parts[0].group_ids)] * 2


def test_a_part_of_a_step_of_which_a_group_is_lost_is_formed_again_without_the_parts_before_it():
    shared = Shared(may_be_lost=True)
    for worker in (0, 1):
        for prompt_group in shared.prompt_groups(worker):
            shared.put(prompt_group)

    def part(wanted: int) -> tuple[int, ...]:
        found = shared.queue.take_step(0, 0, wanted)
        assert isinstance(found, TrainingStep)
        return found.own

    first = part(1)
    assert shared.queue.read(0, 0, [])
    lost = part(2)
    assert not shared.queue.read(0, 0, lost[:1])
    assert shared.coordinator.queue.num_taken == 1

    for worker in (0, 1):
        for prompt_group in shared.prompt_groups(worker):
            shared.put(prompt_group)

    again = part(2)
    assert shared.queue.read(0, 0, []) and not {*first} & {*again}
    assert shared.coordinator.queue.num_taken == 3 and again == lost


def test_a_failure_ends_the_wait_for_ranks_that_have_not_read_yet():
    shared = Shared(num_ranks=2, may_be_lost=True)
    for worker in (0, 1):
        for prompt_group in shared.prompt_groups(worker):
            shared.put(prompt_group)

    shared.part(0)
    threading.Timer(0.1, lambda: shared.queue.fail(RuntimeError("gone"))).start()
    with pytest.raises(RuntimeError, match="gone"):
        shared.queue.read(0, 0, [])


def test_complete_groups_whose_batch_a_checkpoint_does_not_have_are_made_again():
    counted = coordinator(max_staleness=1)
    numbers = [prompt_group.group_id for prompt_group in counted.issue_groups()]
    for number in numbers:
        counted.complete(number, 5)
    queued = {
        number: FinishedGroup(PromptGroup(number, 0, 0, 2, 0), "data", 5) for number in numbers[:-1]
    }
    SharedSampleQueue[str](counted, Waits(), queued=queued)
    assert counted.queue.untaken == numbers[:-1] and counted.checked_counts().running == 1
    assert [prompt_group.group_id for prompt_group in counted.issue_groups()][0] == numbers[-1]


def test_who_takes_a_step_in_parts_hears_of_new_workers_between_them():
    shared = Shared()
    for worker in (0, 1):
        for prompt_group in shared.prompt_groups(worker):
            shared.put(prompt_group)

    assert isinstance(shared.queue.take_step(0, 0, 1), TrainingStep)
    shared.queue.announce_new_workers()
    assert isinstance(shared.queue.take_step(0, 0, 1), NewWorkers)
    assert isinstance(shared.queue.take_step(0, 0, 1), TrainingStep)


def test_a_worker_that_comes_gets_no_group_before_it_asks():
    shared = Shared()
    shared.prompt_groups(0)
    shared.prompt_groups(1)
    shared.queue.lose_worker(0)
    number = shared.queue.add_worker("0")
    again = shared.prompt_groups(1)
    assert again
    shared.queue.lose_worker(1)
    assert shared.prompt_groups(number), "those that it has asked for"


def test_all_ranks_hear_of_newcomers_at_the_same_place_and_before_any_has_a_part_of_the_step():
    shared = Shared(num_ranks=2)
    for worker in (0, 1):
        for prompt_group in shared.prompt_groups(worker):
            shared.put(prompt_group)

    shared.queue.announce_new_workers()
    assert isinstance(shared.queue.take_step(0, 0), NewWorkers)
    assert isinstance(shared.queue.take_step(0, 1), NewWorkers)
    assert not isinstance(shared.queue.take_step(0, 1), NewWorkers)
    shared.queue.announce_new_workers()
    assert not isinstance(shared.queue.take_step(0, 0), NewWorkers), (
        "the other one has its part already"
    )


def test_no_rank_hears_of_newcomers_once_another_may_know_that_no_step_is_left():
    """It would send weights together with ranks that do something else now."""
    shared = queue(DpGroupShares((0, 1)))
    for rank in range(2):
        taken(shared, rank)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: shared.release(0, rank, True), range(2)))
    shared.end_run("enough")
    assert shared.take_step(1, 0) is None
    shared.announce_new_workers()
    assert shared.take_step(1, 1) is None
