"""Generation batches: submitted in group order, dropped one by one, cancelled without a trace."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from distflow.algorithms.group_filter import TOO_FEW_SCORES
from distflow.checks.group_records import GroupRecords
from distflow.data.sample import Sample, Segment
from distflow.graph import BoundNode, Drop, NodeOutput, node
from distflow.observe.writing.timing import Waits
from distflow.rewards.reward_results import RewardCounts
from distflow.rollout.engine import GenerateRequest, Stream, WeightReceipt
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.error_limits import GroupFailures
from distflow.runtime.node_context import Contexts, NodeContext
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from distflow.runtime.rollout_loop.rollout_client import RolloutClient
from distflow.runtime.run_errors import UserNoProgress
from distflow.runtime.sample_queue.local import LocalSampleQueue
from distflow.scheduling.group_states import PromptGroup, Version
from tests.e2e.runs import Playground
from tests.runtime.groups import (
    PARAMS,
    bound,
    context,
    coordinator,
    prompt_group,
    samples,
    waiting_group,
)


class OrderedEngine:
    """An engine that notes what it was asked in which order, and whether it was paused then;
    responds with delays."""

    version = Version(0, 0)

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.paused = False
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        self.log.append((request.stream.row, self.paused))
        try:
            while self.paused:
                await asyncio.sleep(0)
            for _ in range(random.Random(request.stream.row).randrange(8)):
                await asyncio.sleep(0)
            if request.stream.row == 99:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

        return tuple(Segment.drawn(s, [5], [0.0], [0.0], [0], "stop") for s in request.samples)

    async def pause(self, release: bool = False) -> None:
        self.paused = True
        self.log.append("pause")

    async def resume(self) -> None:
        self.paused = False
        self.log.append("resume")

    async def load_weights(self, version: Version, weights: Any) -> WeightReceipt:
        return WeightReceipt(version)


def context_of(group: Group, node_id: str) -> NodeContext:
    return context(group.prompt_group.version, group=group)


@node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
async def answer(group: Group, rollout: Any) -> list[Sample]:
    number = group.prompt_group.group_id
    for _ in range(7 - number % 7):  # later groups are asked sooner
        await asyncio.sleep(0)
    if number != 3:  # a group that asks the engine nothing
        await rollout.generate(GenerateRequest((1,), group.wanted, group.params, group.stream))
    return samples(number, (1, 1), version=group.prompt_group.version)


class Ends(dict[int, str]):
    """How each group ended."""

    def __call__(
        self, group_id: int, version: int, outcome: str, started: float, ended: float
    ) -> None:
        assert started <= ended
        self[group_id] = outcome


def plane_of(engine: Any, *more: BoundNode) -> RolloutLoop:
    client = RolloutClient(engine)
    steps = compile_steps([bound(answer), *more], {"rollout": client})
    return RolloutLoop(
        steps, waiting_group, context_of, client, 10.0, GroupEvents(Ends()), GroupRecords()
    )


async def fill(plane: RolloutLoop, queue: LocalSampleQueue, steps: int) -> list[list[int]]:
    """Learn nothing from each step; the groups of each. Raises what ends the loop."""
    engine: Any = plane.client._engine if plane.client is not None else OrderedEngine()
    loop = asyncio.ensure_future(plane.loop(queue))
    loop.add_done_callback(
        lambda done: done.cancelled() or queue.fail(done.exception() or AssertionError("it ended"))
    )

    taken = []
    for step in range(steps):
        share = await asyncio.to_thread(queue.take, step, 0)
        if share is None:
            break
        taken.append(sorted(set(share.batch["group_index"].tolist())))
        engine.version = queue.release(step, 0, sent_weights=True).version

    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    return taken


def test_a_wave_is_asked_of_a_paused_engine_that_then_resumes():
    engine = OrderedEngine()
    queue = LocalSampleQueue(coordinator(consumer_batch=4), Waits())
    assert asyncio.run(fill(plane_of(engine), queue, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    first = engine.log[: engine.log.index("resume") + 1]
    assert first[0] == "pause" and len(first) == 5, (
        "three requests, and a group without one, between the two"
    )
    assert all(paused for entry in engine.log if not isinstance(entry, str) for paused in entry[1:])


def test_a_node_may_ask_in_tasks_of_its_own():
    @node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
    async def generate_in_tasks(group: Group, rollout: Any) -> list[Sample]:
        requests = [
            GenerateRequest((1,), (sample,), group.params, group.stream) for sample in group.wanted
        ]
        await asyncio.gather(
            *(asyncio.wait_for(rollout.generate(request), 10) for request in requests)
        )
        return samples(group.prompt_group.group_id, (1, 1), version=group.prompt_group.version)

    engine = OrderedEngine()
    client = RolloutClient(engine)  # type: ignore[arg-type]
    steps = compile_steps([bound(generate_in_tasks)], {"rollout": client})
    plane = RolloutLoop(
        steps, waiting_group, context_of, client, 10.0, GroupEvents(Ends()), GroupRecords()
    )
    queue = LocalSampleQueue(coordinator(consumer_batch=4), Waits())
    assert asyncio.run(asyncio.wait_for(fill(plane, queue, 2), 60)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_gate_counts_groups_that_end_without_asking():
    async def run() -> list[Any]:
        engine = OrderedEngine()
        client = RolloutClient(engine)  # type: ignore[arg-type]

        async def asks() -> None:
            await asyncio.sleep(0)
            await client.generate(GenerateRequest((1,), (0,), PARAMS, Stream(1, "t", 0, 1)))

        async def fails() -> None:
            raise KeyError

        async def quiet() -> None:
            return

        tasks = [asyncio.create_task(work()) for work in (asks, fails, quiet)]
        client.begin_batch(tasks)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        return engine.log

    assert asyncio.run(run()) == ["pause", (1, True), "resume"]


@pytest.mark.parametrize(
    "exits", [SystemExit(2), GeneratorExit(2), KeyboardInterrupt(2), asyncio.CancelledError(2)]
)
def test_whatever_a_node_does_costs_its_own_group_only(exits):
    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    async def reward_fn(group: Group) -> Any:
        number = group.prompt_group.group_id
        if number == 1:
            raise KeyError("one")
        if number == 2:
            raise exits
        if number == 5:
            return {"scores": [1.0]}

        return Drop("dull") if number == 4 else [1.0, 0.0]

    plane = plane_of(OrderedEngine(), bound(reward_fn))
    counted = coordinator(total_groups=16, total_steps=3)
    assert asyncio.run(fill(plane, LocalSampleQueue(counted, Waits()), 3)) == [
        [0, 3],
        [6, 7],
        [8, 9],
    ]
    ends = plane.events.ended
    assert isinstance(ends, Ends) and ends[0] == "complete" and ends[4] == "dull"
    assert ends[1].startswith("error: node 'x' raised KeyError: 'one' (at test_group_tasks.py:")
    assert ends[2].startswith(f"error: node 'x' raised {type(exits).__name__}: 2")
    assert ends[5].startswith("error: node 'x' returned something that does not fit")
    assert counted.checked_counts().dropped == {"error": 3, "dull": 1}


def test_a_group_that_fails_by_no_fault_of_the_user_s_is_tried_again(monkeypatch):
    class Failing(OrderedEngine):
        """Its memory is full in the first two attempts of group 0, and in every one of group 1."""

        attempts: Counter[int] = Counter()

        async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
            row = request.stream.row
            self.attempts[row] += 1
            if row == 1 or (row == 0 and self.attempts[0] < 3):
                raise MemoryError
            return await super().generate(request)

    this_file_is_no_users = "distflow.runtime.run_errors.users_place"
    monkeypatch.setattr(this_file_is_no_users, lambda error: None)
    counted = coordinator(shuffle=False)
    loop = plane_of(Failing())
    warnings = list[str]()
    loop.events = replace(loop.events, failed=GroupFailures(warnings.append).add)
    assert asyncio.run(fill(loop, LocalSampleQueue(counted, Waits()), 1)) == [[0, 2]]
    assert Failing.attempts == {0: 3, 1: 3, 2: 1} and counted.checked_counts().dropped == {
        "max_retries": 1
    }
    assert [int(said.split("so far: ")[1].split(")")[0]) for said in warnings] == [1, 2, 4], (
        "of five"
    )
    assert all("generated again" in said and "MemoryError" in said for said in warnings)


@pytest.mark.parametrize("fails", [True, False])
def test_groups_that_all_fail_or_lack_scores_end_the_run_with_the_reason(fails):
    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    def reward_fn(group: Group) -> Any:
        if fails:
            raise KeyError("the grader is down")
        return Drop(TOO_FEW_SCORES, "the grader is down")

    plane = plane_of(OrderedEngine(), bound(reward_fn))
    with pytest.raises(UserNoProgress, match="the grader is down"):
        asyncio.run(fill(plane, LocalSampleQueue(coordinator(), Waits()), 1))
    if not fails:
        assert plane.events.ended[0] == f"{TOO_FEW_SCORES}: the grader is down"  # type: ignore[index]


def test_what_nodes_measured_of_a_group_goes_with_it():
    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    def reward_fn(group: Group) -> Any:
        return NodeOutput({"scores": [1.0, 0.0]}, {"number": float(group.prompt_group.group_id)})

    async def run() -> Any:
        queue = LocalSampleQueue(coordinator(), Waits())
        loop = asyncio.ensure_future(plane_of(OrderedEngine(), bound(reward_fn)).loop(queue))
        share = await asyncio.to_thread(queue.take, 0, 0)
        loop.cancel()
        return share

    assert asyncio.run(run()).metrics == {"number": 0.5}


def test_samples_that_get_no_score_are_counted_with_their_node():
    @node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
    def respond(group: Group) -> list[Sample]:
        return samples(0, (1, 2, 1), valid=(True, False, True))

    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    def reward_fn(group: Group) -> Any:
        return [1.0, 0.0, 0.0]

    steps = compile_steps([bound(respond), bound(reward_fn)], {})
    loop = RolloutLoop(
        steps, waiting_group, context_of, None, 10.0, GroupEvents(Ends()), GroupRecords()
    )
    group = waiting_group(prompt_group(size=3))
    assert asyncio.run(loop.run(group, steps, context_of)) is None
    assert loop.call_counts.take() == RewardCounts(3, 1, "no score (node 'x')")


def test_cancelling_the_plane_aborts_what_the_engine_does():
    async def run() -> int:
        engine = OrderedEngine()
        plane = plane_of(engine)
        queue = LocalSampleQueue(coordinator(num_rows=100, max_staleness=1), Waits())
        loop = asyncio.ensure_future(plane.loop(queue))
        while len([entry for entry in engine.log if not isinstance(entry, str)]) < 2:
            await asyncio.sleep(0)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "no group lives on"

        return engine.cancelled

    assert asyncio.run(run()) == 3, (
        "of the four that may run at once the one that asks nothing was no request"
    )


def test_the_plane_of_a_worker_draws_by_the_run_s_seed_and_sampling_and_stops_at_the_model_s_tokens(
    tmp_path,
):
    given = ("trainer.seed=11", "data.seed=22", "reward.timeout_s=7.0")
    _, spec = Playground(tmp_path).spec("grpo", *given)
    client = RolloutClient(OrderedEngine())  # type: ignore[arg-type]
    parts = Resources(None, (3, 7), {}, 0, rollout=client)  # type: ignore[arg-type]
    contexts = Contexts(spec.config, parts, {}, None)
    plane = RolloutLoop.of(
        spec, [bound(answer)], parts, contexts, GroupRecords(), GroupEvents(Ends())
    )
    made = plane.make_group(PromptGroup(30, 2, 6, 4, 0))
    assert made.stream == Stream(11, "train", 2, 6) and made.row == spec.rows[6]
    assert made.params == replace(spec.sampling, stop_token_ids=(3, 7)) and not made.params.greedy
    assert plane.timeout_s == 7.0 and plane.client is not None


def test_groups_that_ask_at_once_are_submitted_in_group_order():
    @node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
    async def asks(group: Group, rollout: Any) -> list[Sample]:
        await rollout.generate(GenerateRequest((1,), group.wanted, group.params, group.stream))
        return samples(group.prompt_group.group_id, (1, 1), version=group.prompt_group.version)

    engine = OrderedEngine()
    client = RolloutClient(engine)  # type: ignore[arg-type]
    plane = RolloutLoop(
        compile_steps([bound(asks)], {"rollout": client}),
        waiting_group,
        context_of,
        client,
        10.0,
        GroupEvents(Ends()),
        GroupRecords(),
    )
    asyncio.run(
        fill(plane, LocalSampleQueue(coordinator(consumer_batch=4, shuffle=False), Waits()), 1)
    )
    assert [entry[0] for entry in engine.log if not isinstance(entry, str)] == [0, 1, 2, 3]
