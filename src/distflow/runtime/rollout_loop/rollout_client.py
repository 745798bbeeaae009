"""The one wrapper around a worker's rollout engine: all that the worker asks of it goes through
here."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from distflow.data.sample import Segment
from distflow.errors import count_of
from distflow.observe.writing.timing import ENGINE, OTHER_GROUPS, group_waits
from distflow.rollout.engine import GenerateRequest, RolloutEngine, WeightReceipt, generate_whole
from distflow.runtime.checks_protocol import GroupRecorder
from distflow.runtime.rollout_loop.engine_watch import Deadline, EngineHangs, EngineWatch
from distflow.runtime.rollout_loop.generation_batches import (
    EarlyStop,
    GenerationBatch,
    GroupTask,
    Rounds,
    group_task,
)
from distflow.runtime.rollout_loop.user_calls import deadline_paused
from distflow.scheduling.group_states import Version


class RolloutClient:
    """A `RolloutEngine` that forwards to the engine, and

    - watches it while entered: one that hangs is abandoned (`engine_watch.py`);
    - tells the current generation batch which groups have sent a request, and holds requests until
      their round;
    - generates samples that a weight update aborted again, and records what the engine drew.

    It runs only on the asyncio thread, so it needs no lock.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        deadline: Deadline | None = None,
        hangs: Callable[[EngineHangs], None] = lambda error: None,
    ) -> None:
        """deadline: None waits without limit. hangs: called once, on another thread."""
        self._engine = engine
        self._watch = EngineWatch(engine, deadline, hangs)
        self._batch: GenerationBatch | None = None
        self.recorder: GroupRecorder | None = None

    @property
    def version(self) -> Version:
        return self._engine.version

    def __getattr__(self, name: str) -> Any:
        """What only some engines have, such as counts and a log of their activity."""
        return getattr(self._engine, name)

    async def __aenter__(self) -> "RolloutClient":
        self._watch.start()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self._watch.stop)
            with self._watch.asking("to start"):
                await self._engine.__aenter__()
            if_it_fails.pop_all()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        try:
            with self._watch.asking("to end"):
                await self._engine.__aexit__(*exception)
        finally:
            self._watch.stop()

    async def pause(self, release: bool = False) -> None:
        with self._watch.asking("to pause"):
            await self._engine.pause(release)
        self._watch.is_paused = True

    async def resume(self) -> None:
        with self._watch.asking("to resume"):
            await self._engine.resume()
        self._watch.is_paused = False

    async def hashes(self) -> dict[str, str]:
        with self._watch.asking("for hashes of its weights"):
            return await self._engine.hashes()

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        what = "to load the weights of" if weights is not None else "to number its weights as"
        with self._watch.asking(f"{what} step {version.step}"):
            return await self._engine.load_weights(version, weights)

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """The engine's `generate`. Of a generation batch's first round, the request is in the
        engine's queue before this first yields."""
        with deadline_paused():
            if self._batch is not None:
                with group_waits("a round of requests", on=OTHER_GROUPS):
                    await self._batch.turn(request.samples[0])
            with group_waits("responses", on=ENGINE):
                responses = await generate_whole(self._ask, request)
            if self.recorder is not None:
                self.recorder.generated(request, responses)
            return responses

    def begin_batch(
        self,
        tasks: Collection[GroupTask],
        early_stop: EarlyStop | None = None,
        in_rounds: bool = False,
    ) -> GenerationBatch:
        """Begin a generation batch of these group tasks. None of them has run yet: there was no
        await since they were created. early_stop: informed of every response. in_rounds: later
        requests go to the engine in rounds too."""
        rounds = Rounds(tasks, self.pause, self.resume) if in_rounds else None
        self._batch = GenerationBatch(tasks, early_stop, rounds)
        return self._batch

    async def count_tokens(self) -> int:
        """The number of tokens generated so far, once cancelled requests add none. 0 for an engine
        that does not count them, or also counts those of other workers."""
        if getattr(self._engine, "is_shared", False):
            return 0
        await self.pause()
        number = getattr(self._engine, "num_generated_tokens", 0)
        await self.resume()
        return int(number)

    async def _ask(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """One request to the engine. It is cancelled with the group, whichever of its tasks sent
        it, and if the engine can no longer answer."""
        pending = asyncio.ensure_future(self._generate(request))
        own = asyncio.current_task()
        task = group_task.get() or own
        assert task is not None and own is not None
        batch = self._batch
        failed = batch.failed if batch is not None else None
        causes: list[asyncio.Future[Any]] = [task]
        if failed is not None:
            causes.append(failed)

        def end(cause: asyncio.Future[Any]) -> None:
            pending.cancel()

        for cause in causes:
            cause.add_done_callback(end)
        try:
            try:
                # `pending` runs to its first await, which queues its request
                await asyncio.sleep(0)
            finally:  # a request cancelled meanwhile must not be waited for
                if batch is not None:
                    batch.submitted(task)
            responses = await pending
            if batch is not None:
                batch.responded(task, sum(len(each.token_ids) for each in responses))
            return responses
        except asyncio.CancelledError:
            if failed is None or not failed.done() or own.cancelling():
                raise
            raise failed.result() from None
        finally:
            for cause in causes:
                cause.remove_done_callback(end)
            # no effect if done; else this group was cancelled, and so is its request
            pending.cancel()

    async def _generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        with self._watch.asking(_described(request), while_paused=False):
            return await self._engine.generate(request)


def _described(request: GenerateRequest) -> str:
    many = count_of(len(request.samples), "sample")
    return (
        f"for {many} of row {request.stream.row} ({request.stream.name}, epoch "
        f"{request.stream.epoch}; a prompt of "
        f"{len(request.prompt_ids)} tokens, up to {request.params.max_tokens} new ones)"
    )
