"""A generation batch ends when its step is full: in the engine's order, whatever the rewards do,
without leftovers."""

import asyncio
import time
from fractions import Fraction
from typing import Any

import pytest

from distflow.checks.group_records import GroupRecords
from distflow.data.sample import Sample, Segment
from distflow.graph import BoundNode, Drop, node
from distflow.observe.writing.timing import Waits
from distflow.rollout.engine import GenerateRequest
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from distflow.runtime.rollout_loop.rollout_client import RolloutClient
from distflow.runtime.sample_queue.local import LocalSampleQueue
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.group_states import Version
from tests.runtime.groups import bound, context, coordinator, samples, waiting_group
from tests.runtime.rollout_loop.test_group_tasks import Ends, fill


class CountingEngine:
    """Responds in the order of `lengths`, a token each turn of the loop; counts its tokens."""

    version = Version(0, 0)

    def __init__(self, lengths: dict[int, int]) -> None:
        self._lengths = lengths
        self.num_generated_tokens = self.num_cancelled = self.num_running = 0
        self._open = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        row = request.stream.row
        made = 0
        self.num_running += 1

        try:
            await self._open.wait()
            while made < self._lengths.get(row, row % 7 + 1):
                await asyncio.sleep(0)
                made += 1
                self.num_generated_tokens += len(request.samples)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

        each = [0.0] * made
        return tuple(
            Segment.drawn(s, [5] * made, each, each, [self.version.step] * made, "stop")
            for s in request.samples
        )

    async def pause(self, release: bool = False) -> None:
        self._open.clear()

    async def resume(self) -> None:
        self._open.set()


@node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
async def answer(group: Group, rollout: Any) -> list[Sample]:
    request = GenerateRequest((1,), group.wanted, group.params, group.stream)
    await rollout.generate(request)
    return samples(group.prompt_group.group_id, (1, 1), version=group.prompt_group.version)


def plane_of(engine: Any, *more: BoundNode) -> RolloutLoop:
    client = RolloutClient(engine)
    steps = compile_steps([bound(answer), *more], {"rollout": client})
    return RolloutLoop(
        steps,
        waiting_group,
        lambda group, name: context(group.prompt_group.version, group=group),
        client,
        10.0,
        GroupEvents(Ends()),
        GroupRecords(),
        stops_early=True,
    )


def counted(**changes: Any) -> Coordinator:
    more = {
        "oversampling": Fraction(1, 2),
        "shuffle": False,
        "num_rows": 40,
        "total_groups": 40,
        "consumer_batch": 4,
    }
    return coordinator(**{**more, "total_steps": 9, **changes})


def run(plane: RolloutLoop, coordinator: Coordinator, steps: int = 1) -> list[list[int]]:
    """The groups of each step; nothing of the loop may live on."""

    async def filled() -> list[list[int]]:
        taken = await asyncio.wait_for(
            fill(plane, LocalSampleQueue(coordinator, Waits()), steps), 60
        )
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "no group lives on"
        return taken

    return asyncio.run(filled())


LENGTHS = {0: 60, 1: 5, 2: 50, 3: 4, 4: 3, 5: 2, **dict.fromkeys(range(6, 40), 30)}


def test_those_that_are_generated_first_make_the_step_and_the_others_are_aborted():
    engine = CountingEngine(LENGTHS)
    counts = counted()
    plane = plane_of(engine)
    assert run(plane, counts) == [[1, 3, 4, 5]]
    group_counts = counts.checked_counts()
    assert engine.num_cancelled == group_counts.aborted == 2 and engine.num_running == 0
    assert plane.events.ended[0] == plane.events.ended[2] == ("aborted: the step was complete")  # type: ignore[index]


@pytest.mark.parametrize("slow", [(), (5,), (1, 3), (0, 2)])
def test_what_reward_functions_take_changes_nothing(slow):
    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    async def reward_fn(group: Group) -> Any:
        await asyncio.sleep(0.1 if group.prompt_group.group_id in slow else 0)
        return Drop("dull") if group.prompt_group.group_id in (3, 2) else [1.0, 0.0]

    counts = counted()
    taken = run(plane_of(CountingEngine(LENGTHS), bound(reward_fn)), counts, steps=2)
    assert taken[0] == [0, 1, 4, 5], (
        "3 is dropped; of 0 and 2, still running, 2 is first and is dropped"
    )
    assert counts.checked_counts().dropped == {"dull": 2}


@pytest.mark.parametrize("slow", [(), (8, 6)])
def test_one_that_is_answered_when_the_step_is_full_is_asked_again_whatever_its_score(slow):
    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    async def reward_fn(group: Group) -> Any:
        await asyncio.sleep(0.05 if group.prompt_group.group_id == 5 else 0)
        return Drop("dull") if group.prompt_group.group_id in (0, 2) else [1.0, 0.0]

    counts = counted()
    assert run(plane_of(CountingEngine({**LENGTHS, 0: 6, 2: 6}), bound(reward_fn)), counts) == [
        [1, 3, 4, 5]
    ]
    assert counts.checked_counts().dropped == {} and counts.checked_counts().aborted == 2


def test_a_reward_function_that_is_at_work_is_not_waited_for():
    cancelled = []

    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    async def reward_fn(group: Group) -> Any:
        if group.prompt_group.group_id in (0, 2):
            try:
                await asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)  # it tidies up
                cancelled.append(group.prompt_group.group_id)
                raise

        await asyncio.sleep(0.1 if group.prompt_group.group_id == 1 else 0)
        return [1.0, 0.0]

    started = time.monotonic()
    counts = counted()
    assert run(plane_of(CountingEngine({**LENGTHS, 0: 6, 2: 6}), bound(reward_fn)), counts) == [
        [1, 3, 4, 5]
    ]
    assert sorted(cancelled) == [0, 2] and time.monotonic() - started < 50


def test_an_episode_of_several_requests_is_placed_by_its_first_response():
    @node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
    async def two_turns(group: Group, rollout: Any) -> list[Sample]:
        request = GenerateRequest((1,), group.wanted, group.params, group.stream)
        await rollout.generate(request)
        await asyncio.gather(
            *(
                rollout.generate(request)
                for _ in range(3 if group.prompt_group.group_id == 4 else 1)
            )
        )

        return samples(group.prompt_group.group_id, (1, 1), version=group.prompt_group.version)

    engine = CountingEngine(LENGTHS)
    plane = plane_of(engine)
    plane.steps = compile_steps([bound(two_turns)], {"rollout": plane.client})
    counts = counted()
    assert run(plane, counts) == [[1, 3, 4, 5]]
    assert engine.num_running == 0
