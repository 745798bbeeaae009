"""A server of several processes: adapters whose requests are divided over workers, and samplers
that are there."""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distflow.rollout.engine import Stream
from distflow.tinker.adapter import AdapterConfig, TrainedAdapter, read_state
from distflow.tinker.messages import BadRequest, PassRequest, WorkerLost
from distflow.tinker.sampler import SampleRequest
from distflow.tinker.service import BaseModel

Call = Callable[..., "Future[Any]"]
"""Calls a method of a `TinkerWorker`, by name, in its process."""


class TinkerWorker:
    """What a worker does for the server. Its coroutines run on one event loop, its models on one
    thread."""

    def __init__(self, make: Callable[[], BaseModel]) -> None:
        self._make = make
        self._computing = ThreadPoolExecutor(1, "tinker")
        self._adapters: dict[str, TrainedAdapter] = {}
        self._before: dict[str, Tensor | None] = {}

    async def build(self) -> BaseModel:
        """Called first; returns the base without its parts. Raises UserError."""
        self._base = self._make()
        self._samplers = self._base.make_samplers(self._computing)
        none: Any = None
        return replace(self._base, make_adapter=none, make_samplers=none)

    async def train(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of an adapter; `add` makes it, and `undo` takes the gradients of its last
        pass away."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._computing, self._train, name, method, arguments)

    async def sample(self, folder: Path | None, request: SampleRequest, stream: Stream) -> bytes:
        """See `Samplers.sample`."""
        drawn: bytes = await self._samplers.sample(folder, request, stream)
        return drawn

    def _train(self, name: str, method: str, arguments: Sequence[Any]) -> Any:
        if method == "add":
            self._adapters[name] = self._base.make_adapter(name, *arguments)
            return None

        adapter = self._adapters[name]
        if method == "undo":
            adapter.set_gradients(self._before)
            return None
        if method == "close":
            del self._adapters[name]
        if method == "run":
            self._before = adapter.gradients()

        return getattr(adapter, method)(*arguments)


class DividedAdapter:
    """As `TrainedAdapter`. Each worker has a copy with the gradients of its share of the data,
    until they are summed at a step."""

    def __init__(self, workers: Sequence[Call], name: str, config: AdapterConfig) -> None:
        """Raises BadRequest."""
        self._workers = workers
        self._name = name
        self.config = config
        self.num_steps = 0
        try:
            self._all("add", config)
        except BaseException:
            for worker in workers:
                worker("train", name, "close").exception()
            raise

    def run(self, request: PassRequest) -> tuple[list[Tensor], dict[str, float]]:
        """See `TrainedAdapter.run`. After an error no worker has a gradient of the request."""
        shares = _shares([len(each.token_ids) for each in request.data], len(self._workers))
        asked = []
        for worker, share in zip(self._workers, shares, strict=True):
            own = replace(request, data=tuple(request.data[index] for index in share))
            if share:
                asked.append((worker, share, worker("train", self._name, "run", own)))

        failed = _first_error([answer for _, _, answer in asked])
        if failed is not None:
            for worker, _, answer in asked:
                if answer.exception() is None:
                    worker("train", self._name, "undo").result()
            if isinstance(failed[1], BadRequest):
                raise _renumbered(failed[1], asked[failed[0]][1])
            raise failed[1]

        log_probs: list[Tensor] = [torch.empty(0)] * len(request.data)
        sums = dict[str, float]()
        for _, share, answer in asked:
            of_share, metrics = answer.result()
            for index, own in zip(share, of_share, strict=True):
                log_probs[index] = own
            for metric, value in metrics.items():
                sums[metric] = sums.get(metric, 0.0) + value

        return log_probs, sums

    def step(self, options: object) -> dict[str, float]:
        """See `TrainedAdapter.step`."""
        metrics: dict[str, float] = self._all("step", options)
        self.num_steps += 1
        return metrics

    def save(self, folder: Path, with_optimizer: bool, metadata: object = None) -> None:
        """By the first worker, whose copy is that of all."""
        first = self._workers[0]
        first("train", self._name, "save", folder, with_optimizer, metadata).result()

    def load(self, folder: Path, with_optimizer: bool) -> None:
        """See `TrainedAdapter.load`."""
        self._all("load", folder, with_optimizer)
        self.num_steps = int(read_state(folder)["num_steps"])

    def close(self) -> None:
        self._all("close")

    def _all(self, method: str, *arguments: object) -> Any:
        """The answer of the first worker, when all have answered. Raises the first error."""
        asked = [worker("train", self._name, method, *arguments) for worker in self._workers]
        failed = _first_error(asked)
        if failed is not None:
            raise failed[1]
        return asked[0].result()


class WorkersSamplers:
    """As `Samplers`, each request on the worker with the fewest that lives."""

    def __init__(self, workers: Sequence[Call]) -> None:
        self._running = dict.fromkeys(workers, 0)

    async def sample(self, folder: Path | None, request: SampleRequest, stream: Stream) -> bytes:
        while True:
            worker = min(self._running, key=lambda each: self._running[each])
            self._running[worker] += 1
            try:
                asked = worker("sample", folder, request, stream)
                drawn: bytes = await asyncio.wrap_future(asked)
                return drawn
            except WorkerLost:
                if len(self._running) == 1:
                    raise
                self._running.pop(worker, None)
            finally:
                if worker in self._running:
                    self._running[worker] -= 1

    async def close(self) -> None:
        """Their engines end with the workers."""


def _shares(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Neighbours stay together, since they often have a prompt in common; each share has about as
    many tokens."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    before = 0
    for index, length in enumerate(lengths):
        middle = before + length / 2
        shares[int(middle * num_shares / sum(lengths))].append(index)
        before += length

    return shares


def _first_error(asked: Sequence["Future[Any]"]) -> tuple[int, BaseException] | None:
    """With its place, when all have answered: that of a worker that has died before those of the
    others, which it may have caused."""
    found = list[tuple[int, BaseException]]()
    for place, answer in enumerate(asked):
        error = answer.exception()
        if error is not None:
            found.append((place, error))

    return min(found, key=lambda each: not isinstance(each[1], WorkerLost), default=None)


def _renumbered(error: BadRequest, share: Sequence[int]) -> BadRequest:
    """The error of a share, with the datum's number in the whole request."""
    return BadRequest(
        re.sub(r"^datum (\d+)", lambda found: f"datum {share[int(found[1])]}", str(error))
    )
