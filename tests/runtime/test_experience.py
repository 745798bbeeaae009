"""Waves of groups: submitted in ticket order, dropped one by one, cancelled without a trace."""

import asyncio
import random
from typing import Any

import pytest
from distflow.runtime.local_edge import LocalEdge, UserNoProgress

from distflow.data.batch import Batch
from distflow.flow.ticket import Ticket, Version
from distflow.graph import BoundNode, Drop, node
from distflow.rollout.engine import GenerateRequest, GenerateResult, Generation, Receipt, SamplingParams, Stream
from distflow.runtime.context import GroupContext, NodeContext
from distflow.runtime.experience import ExperiencePlane, SubmissionGate
from distflow.training.collective import OneRank
from tests.runtime.groups import bound, context, coordinator, group

PARAMS = SamplingParams(4)


class OrderedEngine:
    """An engine that notes what it was asked in which order, and whether it was paused then; answers with delays."""

    version = Version(0, 0)

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.paused = False
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
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
        return GenerateResult(tuple(Generation(s, [5], [0.0], [0.0], [0], "stop") for s in request.samples))

    async def pause(self, release: bool = False) -> None:
        self.paused = True
        self.log.append("pause")

    async def resume(self) -> None:
        self.paused = False
        self.log.append("resume")

    async def load_weights(self, version: Version, weights: Any) -> Receipt:
        return Receipt(version)


class Row:
    prompt_ids = (1, 2, 3)
    prompt_text, domain, ground_truth, extra_info = "p", "default", None, None


def context_of(ticket: Ticket, node_id: str) -> NodeContext:
    stream = Stream(1, "train", 0, ticket.row)
    group_context = GroupContext(ticket, Row(), PARAMS, tuple(range(ticket.group_size)), stream)  # type: ignore[arg-type]
    return NodeContext(context().config, 0, None, context().judge, lambda *a: None, group=group_context)


@node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
async def answer(batch: Batch, rollout: Any, ctx: NodeContext) -> Batch:
    assert ctx.group is not None
    for _ in range(ctx.group.row is None or (7 - ctx.group.ticket.number % 7)):  # later groups are asked sooner
        await asyncio.sleep(0)
    if ctx.group.ticket.number == 3:
        return group(3, (1, 1))  # a group that asks the engine nothing
    await rollout.generate(GenerateRequest((1,), ctx.group.samples, PARAMS, ctx.group.stream))
    return group(ctx.group.ticket.number, (1, 1))


def plane_of(engine: Any, *more: BoundNode) -> ExperiencePlane:
    return ExperiencePlane((bound(answer), *more), {"rollout": engine}, context_of, OneRank(), 10.0)


async def fill(plane: ExperiencePlane, edge: LocalEdge, steps: int) -> list[list[int]]:
    """Learn nothing from each step; the groups of each."""
    loop = asyncio.ensure_future(plane.loop(edge))
    taken = []
    for step in range(steps):
        batch = await asyncio.to_thread(edge.take, step)
        if batch is None:
            break
        taken.append(sorted(set(batch["group_index"].tolist())))
        edge.release(step, published=True)
        edge.go_on()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    return taken


def test_a_wave_is_asked_of_a_paused_engine_that_then_resumes() -> None:
    engine = OrderedEngine()
    edge = LocalEdge(coordinator(consumer_batch=4), lambda *a: None)
    assert asyncio.run(fill(plane_of(engine), edge, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    first = engine.log[: engine.log.index("resume") + 1]
    assert first[0] == "pause" and len(first) == 5, "three requests, and a group without one, between the two"
    assert all(paused for entry in engine.log if not isinstance(entry, str) for paused in entry[1:])


def test_the_gate_counts_groups_that_end_without_asking() -> None:
    async def run() -> list[Any]:
        engine = OrderedEngine()
        gate = SubmissionGate(engine)  # type: ignore[arg-type]
        await engine.pause()

        async def asks() -> None:
            await asyncio.sleep(0)
            await gate.generate(GenerateRequest((1,), (0,), PARAMS, Stream(1, "t", 0, 1)))

        async def fails() -> None:
            raise KeyError

        async def quiet() -> None:
            return

        tasks = [asyncio.create_task(work()) for work in (asks, fails, quiet)]
        gate.expect(tasks)
        await asyncio.wait_for(gate.all_in(), 10)
        await engine.resume()
        await asyncio.gather(*tasks, return_exceptions=True)
        empty = SubmissionGate(engine)  # type: ignore[arg-type]
        empty.expect([])
        await asyncio.wait_for(empty.all_in(), 10)
        return engine.log

    assert asyncio.run(run()) == ["pause", (1, True), "resume"]


def test_whatever_a_node_does_costs_its_own_group_only() -> None:
    @node(writes="token_level_rewards", role="REWARD", scope="group", reads=("response_mask",))
    async def judge(batch: Batch, ctx: NodeContext) -> Any:
        assert ctx.group is not None
        number = ctx.group.ticket.number
        if number == 1:
            raise KeyError("one")
        if number == 2:
            raise SystemExit(2)
        return Drop("dull") if number == 4 else batch["response_mask"]

    ends: dict[int, str] = {}
    edge = LocalEdge(coordinator(consumer_batch=2), lambda t, outcome, *a: ends.__setitem__(t.number, outcome))
    taken = asyncio.run(fill(plane_of(OrderedEngine(), bound(judge)), edge, 3))
    assert taken == [[0, 3], [5, 6], [7]]
    assert ends[0] == "complete" and ends[4] == "dull"
    assert ends[1].startswith("error: node 'x' raised KeyError: 'one' (at test_experience.py:")
    assert ends[2].startswith("error: node 'x' raised SystemExit: 2")
    assert edge.coordinator.accounting().dropped == {"error": 2, "dull": 1}


def test_a_program_that_always_fails_ends_with_the_reason() -> None:
    @node(writes="token_level_rewards", role="REWARD", scope="group", reads=("response_mask",))
    def judge(batch: Batch, ctx: NodeContext) -> Any:
        raise KeyError("every time")

    edge = LocalEdge(coordinator(), lambda *a: None)
    with pytest.raises(UserNoProgress, match="every time"):
        asyncio.run(fill(plane_of(OrderedEngine(), bound(judge)), edge, 1))


def test_cancelling_the_plane_aborts_what_the_engine_does() -> None:
    async def run() -> int:
        engine = OrderedEngine()
        plane, edge = plane_of(engine), LocalEdge(coordinator(num_rows=100, shuffle=False), lambda *a: None)
        loop = asyncio.ensure_future(plane.loop(edge))
        while len([entry for entry in engine.log if not isinstance(entry, str)]) < 2:
            await asyncio.sleep(0)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "no group lives on"
        return engine.cancelled

    assert asyncio.run(run()) == 2
