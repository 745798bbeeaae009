"""When requests reach the rollout engine: those of a generation batch together, and in rounds where its groups ask
several times. So what is decoded together depends on no timing, and a run that is killed and resumed draws the same."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar

from distflow.rollout.engine import GenerateRequest, GenerateResult, RolloutEngine, generate_whole
from distflow.runtime import fault_injection
from distflow.runtime.abort_surplus_groups import EarlyStop
from distflow.runtime.audit_protocol import GroupRecorder
from distflow.runtime.user_calls.async_calls import deadline_paused
from distflow.scheduling.groups import Version

GroupTask = asyncio.Task[None]

group_task: ContextVar[asyncio.Task[None] | None] = ContextVar("group_task", default=None)
"""The task of the group that is running; tasks that a node starts (`gather`, `wait_for`) inherit it."""


class SubmissionGate:
    """A wrapper of the rollout engine that knows which groups of a generation batch have sent it their request, or
    ended without one.

    The nodes of the rollout loop are compiled with the gate in the engine's place, and have its `generate`, `pause` and
    `resume`. Between generation batches it only forwards. It runs on the asyncio thread alone, so it needs no lock.
    """

    def __init__(self, engine: RolloutEngine, group_recorder: GroupRecorder) -> None:
        self._engine, self._recorder = engine, group_recorder
        self.pause, self.resume = engine.pause, engine.resume
        self._waiting: set[asyncio.Task[None] | None] = set()
        self._all_in = asyncio.Event()
        self._early_stop: EarlyStop | None = None
        self._rounds: Rounds | None = None

    def expect(
        self, tasks: Collection[asyncio.Task[None]], early_stop: EarlyStop | None = None, in_rounds: bool = False
    ) -> None:
        """Begin a generation batch of these group tasks. None of them has run yet: they were created without an await
        since. early_stop: informed of every response. in_rounds: later requests go to the engine in rounds too."""
        self._waiting, self._early_stop = set(tasks), early_stop
        self._all_in = asyncio.Event()
        self._rounds = Rounds(tasks, self.pause, self.resume) if in_rounds else None
        for task in tasks:
            task.add_done_callback(self.arrived)  # one that ends without a request must not be waited for

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The engine's `generate`; its request is in the engine's queue before this yields for the first time.
        Responses that a weight update cut off are generated again."""
        with deadline_paused():
            fault_injection.reach("rollout.generate")
            if self._rounds is not None:
                await self._rounds.turn(group_task.get(), request.samples[0])
            result = await generate_whole(self._ask, request)
            self._recorder.generated(request, result)
            return result

    async def _ask(self, request: GenerateRequest) -> GenerateResult:
        pending = asyncio.ensure_future(self._engine.generate(request))
        task = group_task.get() or asyncio.current_task()
        assert task is not None

        def end(task: asyncio.Task[None]) -> None:
            pending.cancel()

        task.add_done_callback(end)  # of a request that nobody waits for any more, by a task that its group started
        try:
            await asyncio.sleep(0)  # `pending` runs to its first await, after which its request is queued
            self.arrived(task)
            if self._rounds is not None:
                self._rounds.submitted(task)
            result = await pending
            if self._early_stop is not None:
                self._early_stop.responded(task, sum(len(made.token_ids) for made in result.generations))
            return result
        finally:
            task.remove_done_callback(end)
            pending.cancel()  # no effect if it is done; else this group was cancelled, and its request with it

    async def all_in(self) -> None:
        """Wait until every group of the generation batch has arrived."""
        if self._waiting:
            await self._all_in.wait()

    @property
    def version(self) -> Version:
        return self._engine.version

    async def num_generated_tokens(self) -> int:
        """Generated so far, none of them later for cancelled requests. 0 for an engine that does not count them."""
        await self.pause()
        number = getattr(self._engine, "num_generated_tokens", 0)
        await self.resume()
        return int(number)

    def asks_no_more(self, task: asyncio.Task[None] | None) -> None:
        """The group has been through all of its nodes."""
        self.arrived(task)
        if self._rounds is not None:
            self._rounds.left(task)

    def arrived(self, task: asyncio.Task[None] | None) -> None:
        """The group has sent its request, or needs none."""
        self._waiting.discard(task)
        if not self._waiting:
            self._all_in.set()


class Rounds:
    """Holds requests until every group of the generation batch has sent one, or asks no more; then all go to the paused
    engine, in the order of groups and samples, before it resumes. The first round is the batch's start, which is not
    held. A group has no request in the engine when it sends those of its next round.

    Everything here runs on the asyncio thread.
    """

    def __init__(
        self,
        tasks: Collection[GroupTask],
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self._order = {task: number for number, task in enumerate(tasks)}
        self._pause, self._resume = pause, resume
        self._asking, self._begun = set(tasks), set[GroupTask]()
        self._held: dict[asyncio.Future[None], tuple[int, int, GroupTask]] = {}
        self._num_released, self._all_submitted = 0, asyncio.Event()
        self._releasing: asyncio.Task[None] | None = None
        for task in tasks:
            task.add_done_callback(self.left)

    async def turn(self, task: GroupTask | None, sample: int) -> None:
        """Returns when the request may go to the engine. Requests of other tasks may at once."""
        if task not in self._order or task is None:
            return
        if task not in self._begun:
            return
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[held] = (self._order[task], sample, task)
        self._look()
        try:
            await held
        except asyncio.CancelledError:
            self._held.pop(held, None)
            if held.done() and not held.cancelled():
                self._submitted()
            raise

    def submitted(self, task: GroupTask | None) -> None:
        """A request of the group is in the engine's queue."""
        if task in self._begun:
            self._submitted()
        elif task is not None and task in self._order:
            asyncio.get_running_loop().call_soon(self._begun.add, task)  # after the others of its first round

    def left(self, task: GroupTask | None) -> None:
        """The group asks no more."""
        self._asking.discard(task)
        self._look()

    def _submitted(self) -> None:
        self._num_released -= 1
        if self._num_released <= 0:
            self._all_submitted.set()

    def _look(self) -> None:
        waiting = {task for _, _, task in self._held.values()}
        if self._held and self._asking <= waiting and self._releasing is None:
            self._releasing = asyncio.ensure_future(self._release())

    async def _release(self) -> None:
        await asyncio.sleep(0)  # a group's requests of one round come in the same turn of the loop
        await self._pause()
        try:
            held = sorted(self._held.items(), key=lambda item: item[1][:2])
            self._held, self._num_released = {}, len(held)
            self._all_submitted.clear()
            for future, _ in held:
                if not future.done():
                    future.set_result(None)
                else:
                    self._submitted()
            if held:
                await self._all_submitted.wait()
        finally:
            await self._resume()
            self._releasing = None
            self._look()
