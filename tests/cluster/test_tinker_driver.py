"""Adapters that are divided over workers against one that is whole: here the workers are threads,
whose sums are exact."""

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.cluster.tinker_driver import Call, DividedAdapter, TinkerWorker, WorkersSamplers
from distflow.models.loading import load_model
from distflow.rollout.engine import SamplingParams, Stream
from distflow.tinker.adapter import AdapterConfig, SharedBase, StepOptions, TrainedAdapter
from distflow.tinker.messages import BadRequest, Datum, PassRequest, WorkerLost
from distflow.tinker.model_memory import ModelMemory
from distflow.tinker.sampler import SampleRequest
from distflow.tinker.service import BaseModel
from distflow.training.engine import Collective, OneRank
from tests.tiny_models import write_tiny_model

pytest.importorskip("peft")
CONFIG = AdapterConfig(rank=4, seed=7, attention=True, mlp=True)
LENGTHS = ((5, 9, 3, 30, 2, 7, 4), (6,), (2, 2, 40))


class Threads:
    """A `Collective` of threads."""

    size = 2

    def __init__(self, rank: int, values: list[Any], meeting: threading.Barrier) -> None:
        self.rank = rank
        self._values = values
        self._meeting = meeting

    def sum(self, value: Any) -> Any:
        first, second = self.gather(value)
        return first + second

    def max(self, value: Any) -> Any:
        return max(self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._meeting.wait(60)
        found = [*self._values]
        self._meeting.wait(60)
        return found


class Drawer:
    """One that draws its place."""

    def __init__(self, place: int) -> None:
        self._place = place

    async def sample(self, folder: Path | None, request: SampleRequest, stream: Stream) -> bytes:
        await asyncio.sleep(0.05)
        return bytes([self._place])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("workers") / "model", "qwen3")


def make_base(model: Path, folder: Path, group: Collective) -> SharedBase:
    return SharedBase(load_model(model), None, ModelMemory(math.inf, folder), group)


def worker(model: Path, folder: Path, place: int, group: Collective) -> Call:
    """One on an event loop of its own."""

    def make_samplers(scoring: Executor) -> Drawer:
        return Drawer(place)

    def make() -> BaseModel:
        make_adapter = partial(TrainedAdapter, make_base(model, folder / str(place), group))
        return BaseModel("tiny", str(model), "qwen3", 64, (), make_adapter, make_samplers, str)

    made = TinkerWorker(make)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    asyncio.run_coroutine_threadsafe(made.build(), loop).result()

    def call(method: str, *arguments: object) -> "Future[Any]":
        answer = asyncio.run_coroutine_threadsafe(getattr(made, method)(*arguments), loop)
        if "add" in arguments:
            # threads share the generator from which weights are drawn
            wait([answer])
        return answer

    return call


@pytest.fixture
def workers(model: Path, tmp_path: Path) -> list[Call]:
    values: list[Any] = [None, None]
    meeting = threading.Barrier(2)
    return [worker(model, tmp_path, place, Threads(place, values, meeting)) for place in (0, 1)]


def request(lengths: Sequence[int], forward_only: bool = False) -> PassRequest:
    generator = torch.Generator().manual_seed(sum(lengths))
    data = []
    for length in lengths:
        ids = torch.randint(5, 60, (length + 1,), generator=generator)
        weights = torch.rand(length, generator=generator)
        data.append(Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights}))
    return PassRequest("cross_entropy", {}, tuple(data), forward_only)


def test_an_adapter_over_workers_is_the_adapter(
    model: Path, tmp_path: Path, workers: list[Call]
) -> None:
    """Also for requests with fewer data than workers."""
    divided = DividedAdapter(workers, "one", CONFIG)
    whole = TrainedAdapter(make_base(model, tmp_path, OneRank()), "one", CONFIG)
    options = StepOptions(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
    for _ in range(3):
        for lengths in LENGTHS:
            log_probs, metrics = divided.run(request(lengths))
            expected, of_whole = whole.run(request(lengths))
            assert metrics == pytest.approx(of_whole, rel=1e-5)
            torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
        assert divided.step(options) == pytest.approx(whole.step(options), rel=1e-5)

    assert divided.num_steps == 3
    divided.save(tmp_path, with_optimizer=True)
    again = DividedAdapter(workers, "two", CONFIG)
    again.load(tmp_path, with_optimizer=True)
    assert again.num_steps == 3
    for adapter in (divided, again, whole):
        adapter.run(request(LENGTHS[0]))
        adapter.step(options)
    last = request(LENGTHS[0], forward_only=True)
    expected = whole.run(last)[0]
    torch.testing.assert_close(divided.run(last)[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.run(last)[0], expected, rtol=1e-5, atol=1e-5)
    divided.close()
    again.close()


def test_after_a_wrong_datum_no_worker_has_its_gradient(
    model: Path, tmp_path: Path, workers: list[Call]
) -> None:
    divided = DividedAdapter(workers, "one", CONFIG)
    whole = TrainedAdapter(make_base(model, tmp_path, OneRank()), "one", CONFIG)
    with pytest.raises(BadRequest, match="without gradients"):
        divided.step(StepOptions())

    right = request(LENGTHS[0])
    wrong = Datum(torch.tensor([5, 4000]), {"target_tokens": torch.tensor([5, 5])})
    for adapter in (divided, whole):
        adapter.run(right)
        with pytest.raises(BadRequest, match="datum 7"):
            adapter.run(PassRequest("cross_entropy", {}, (*right.data, wrong), False))
    assert divided.step(StepOptions()) == pytest.approx(whole.step(StepOptions()), rel=1e-5)

    with pytest.raises(BadRequest, match="rank 0"):
        DividedAdapter(workers, "two", AdapterConfig(0, 7, attention=True, mlp=True))


def test_samples_are_drawn_by_all_workers_that_live(model: Path, tmp_path: Path) -> None:
    alive = [worker(model, tmp_path, place, OneRank()) for place in (0, 1)]

    def lost(method: str, *arguments: object) -> "Future[Any]":
        answer: Future[Any] = Future()
        answer.set_exception(WorkerLost("worker 2 has died"))
        return answer

    asked = SampleRequest((5,), 1, SamplingParams(2), None, False, 0, 0)

    async def draw(calls: Sequence[Call]) -> list[bytes]:
        sampler = WorkersSamplers(calls)
        drawn = [sampler.sample(None, asked, Stream(1, "seed", 0, number)) for number in range(6)]
        found = await asyncio.gather(*drawn)
        await sampler.close()
        return found

    assert sorted(asyncio.run(draw([lost, *alive]))) == [b"\0"] * 3 + [b"\1"] * 3
    with pytest.raises(WorkerLost, match="worker 2"):
        asyncio.run(draw([lost]))
