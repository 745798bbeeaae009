"""The one wrapper around a worker's rollout engine: all that the worker asks of it goes through
here."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from distflow.data.sample import Segment
from distflow.errors import count_of
from distflow.observe.writing.timing import ENGINE, OTHER_GROUPS, group_waits
from distflow.rollout.engine import GenerateRequest, RolloutEngine, WeightReceipt, generate_whole
from distflow.runtime.checks_protocol import GroupRecorder
from distflow.runtime.rollout_loop.early_stop import EarlyStop, GroupTask
from distflow.runtime.rollout_loop.engine_watch import Deadline, EngineHangs, EngineWatch
from distflow.runtime.rollout_loop.generation_batches import GenerationBatch, group_task
from distflow.runtime.rollout_loop.user_calls import deadline_paused
from distflow.scheduling.group_states import Version


class RolloutClient:
    """A `RolloutEngine` that forwards to the engine, and

    - watches it while entered: one that hangs is abandoned (`engine_watch.py`);
    - holds requests of the current generation batch until their round;
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
        what = "to number its weights as"
        if weights is not None:
            what = "to load the weights of"
        with self._watch.asking(f"{what} step {version.step}"):
            return await self._engine.load_weights(version, weights)

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        with deadline_paused():
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
        """Begin a generation batch of these group tasks, none of which has run yet. early_stop:
        informed of every response. in_rounds: see `GenerationBatch`."""
        self._batch = GenerationBatch(tasks, self.pause, self.resume, early_stop, in_rounds)
        return self._batch

    async def _ask(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """One request to the engine, in its turn."""
        own = asyncio.current_task()
        task = group_task.get() or own
        assert task is not None and own is not None

        batch = self._batch
        if batch is None:
            with group_waits("responses", on=ENGINE):
                return await self._answered(request, [task])

        with group_waits("a round of requests", on=OTHER_GROUPS):
            is_held = await batch.turn(task, request.samples[0])

        try:
            with group_waits("responses", on=ENGINE):
                responses = await self._answered(
                    request, [task, batch.failed], batch.submitted if is_held else None
                )
        except asyncio.CancelledError:
            if not batch.failed.done() or own.cancelling():
                raise
            raise batch.failed.result() from None

        batch.responded(task)
        return responses

    async def _answered(
        self,
        request: GenerateRequest,
        causes: "Sequence[asyncio.Future[Any]]",
        submitted: Callable[[], None] | None = None,
    ) -> tuple[Segment, ...]:
        """The engine's responses. The request is cancelled if one of `causes` ends: the group,
        whichever of its tasks sent it, or the engine's answering. submitted: called once it is in
        the engine's queue."""
        pending = asyncio.ensure_future(self._generate(request))

        def end(cause: asyncio.Future[Any]) -> None:
            pending.cancel()

        for cause in causes:
            cause.add_done_callback(end)

        try:
            try:
                # `pending` runs to its first await, which queues its request
                await asyncio.sleep(0)
            finally:  # a request cancelled meanwhile must not be waited for
                if submitted is not None:
                    submitted()

            return await pending
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
        f"{request.stream.epoch}; a prompt of {len(request.prompt_ids)} tokens, up to "
        f"{request.params.max_tokens} new ones)"
    )
