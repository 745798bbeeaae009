"""Groups that ask several times: at staleness 0 their requests reach the engine in rounds, whatever
takes how long."""

import asyncio
import os

import pytest

from distflow.data.sample import Segment
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from distflow.runtime.rollout_loop.generation_batches import group_task
from distflow.runtime.rollout_loop.rollout_client import RolloutClient


class Engine:
    """Records what is in its queue whenever it resumes, and answers what it has after a while."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[int, int]]] = []
        self._new: list[tuple[int, int]] = []
        self._running = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        self._new.append((request.stream.row, request.samples[0]))
        await self._running.wait()
        await asyncio.sleep(os.urandom(1)[0] / 50_000)
        made = [Segment.drawn(sample, [1], [0.0], [0.0], [0], "stop") for sample in request.samples]
        return tuple(made)

    async def pause(self, release: bool = False) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self.rounds.append(self._new)
        self._new = []
        self._running.set()


def request(group: int, sample: int) -> GenerateRequest:
    return GenerateRequest((1,), (sample,), SamplingParams(4), Stream(0, "train", 0, group))


@pytest.mark.parametrize("in_rounds", [True, False])
def test_turns_of_a_generation_batch_advance_together(in_rounds):
    """Three groups of two episodes with 3, 1 and 2 turns; between them they wait for times that are
    drawn."""

    async def run() -> list[list[tuple[int, int]]]:
        engine = Engine()
        client = RolloutClient(engine)  # type: ignore[arg-type]

        async def group(number: int, turns: int) -> None:
            group_task.set(asyncio.current_task())
            for _ in range(turns):
                await asyncio.gather(
                    *(client.generate(request(number, sample)) for sample in range(2))
                )
                await asyncio.sleep(os.urandom(1)[0] / 20_000)

        tasks = [
            asyncio.create_task(group(number, turns)) for number, turns in enumerate((3, 1, 2))
        ]
        client.begin_batch(tasks, None, in_rounds)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

        return engine.rounds

    rounds = asyncio.run(run())
    both = [(number, sample) for number in range(3) for sample in range(2)]
    assert rounds[0] == both
    assert rounds[1:] == ([[*both[:2], *both[4:]], both[:2]] if in_rounds else [])


def test_a_group_that_is_cancelled_or_fails_holds_nobody():
    async def run() -> int:
        engine = Engine()
        client = RolloutClient(engine)  # type: ignore[arg-type]

        async def group(number: int) -> int:
            group_task.set(asyncio.current_task())
            for turn in range(3):
                await client.generate(request(number, 0))
                if turn == 0 and number == 1:
                    raise RuntimeError("a node failed")
                if turn == 0 and number == 2:
                    await asyncio.sleep(3600)

            return number

        tasks = [asyncio.create_task(group(number)) for number in range(4)]
        client.begin_batch(tasks, None, True)
        await asyncio.sleep(0.05)
        tasks[2].cancel()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

        return sum(isinstance(each, int) for each in ended)

    assert asyncio.run(run()) == 2


class FailsLater(Engine):
    """Fails what it is told to, after some rounds."""

    def __init__(self, failing: str, num_rounds: int) -> None:
        super().__init__()
        self.failing = failing
        self.num_rounds = num_rounds

    def reach(self, name: str) -> None:
        if len(self.rounds) == self.num_rounds and name == self.failing:
            raise RuntimeError(f"it does not {name}")

    async def pause(self, release: bool = False) -> None:
        self.reach("pause")
        await super().pause()

    async def resume(self) -> None:
        self.reach("resume")
        await super().resume()


@pytest.mark.parametrize("num_rounds", [0, 1])
@pytest.mark.parametrize("failing", ["pause", "resume"])
def test_an_engine_that_fails_in_a_round_fails_the_requests_of_all_groups(failing, num_rounds):
    async def run() -> list[object]:
        engine = FailsLater(failing, num_rounds)
        client = RolloutClient(engine)  # type: ignore[arg-type]

        async def group(number: int) -> None:
            group_task.set(asyncio.current_task())
            for _ in range(2):
                await client.generate(request(number, 0))

        tasks = [asyncio.create_task(group(number)) for number in range(3)]
        client.begin_batch(tasks, None, True)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    assert [repr(error) for error in asyncio.run(run())] == [
        f"RuntimeError('it does not {failing}')"
    ] * 3
