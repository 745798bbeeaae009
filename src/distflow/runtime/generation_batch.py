"""A generation batch: groups that start together, and their end when the step is full and the rest is aborted."""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from distflow.rollout.engine import GenerateRequest, GenerateResult, RolloutEngine
from distflow.runtime import fault_injection
from distflow.runtime.audit_protocol import GroupRecorder
from distflow.runtime.sample_queue.protocol import StoppingSampleQueue
from distflow.runtime.user_calls.async_calls import deadline_paused
from distflow.runtime.user_calls.sync_calls import PlainCalls
from distflow.scheduling.groups import PromptGroup, Version

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
        self._waiting: set[asyncio.Task[None] | None] = set()
        self._all_in = asyncio.Event()
        self._early_stop: EarlyStop | None = None

    def expect(self, tasks: Collection[asyncio.Task[None]], early_stop: "EarlyStop | None" = None) -> None:
        """Begin a generation batch of these group tasks. None of them has run yet: they were created without an await
        since. early_stop: informed of every response."""
        self._waiting, self._early_stop = set(tasks), early_stop
        self._all_in = asyncio.Event()
        for task in tasks:
            task.add_done_callback(self.arrived)  # one that ends without a request must not be waited for

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The engine's `generate`; its request is in the engine's queue before this yields for the first time.
        Responses that a weight update cut off are generated again."""
        with deadline_paused():
            fault_injection.reach("rollout.generate")
            result = await self._ask(request)
            while aborted := tuple(made.sample for made in result.generations if made.finish_reason == "abort"):
                again = await self._ask(replace(request, samples=aborted))
                redone = {made.sample: made for made in again.generations}
                result = GenerateResult(tuple(redone.get(made.sample, made) for made in result.generations))
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
        """The version of the engine's weights."""
        return self._engine.version

    async def num_generated_tokens(self) -> int:
        """Generated so far, none of them later for cancelled requests. 0 for an engine that does not count them."""
        await self._engine.pause()
        number = getattr(self._engine, "num_generated_tokens", 0)
        await self._engine.resume()
        return int(number)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    def arrived(self, task: asyncio.Task[None] | None) -> None:
        """The group has sent its request, or needs none."""
        self._waiting.discard(task)
        if not self._waiting:
            self._all_in.set()


@dataclass
class _Turn:
    """Of one group. accepted: set after its last node; whether it wants a place in the step. go: it may be queued, or
    reported as dropped."""

    accepted: "asyncio.Future[bool]"
    go: asyncio.Event = field(default_factory=asyncio.Event)


class EarlyStop:
    """Lets the groups of a generation batch pass to the queue one by one: first those without a request to the engine,
    by group id, then in the order of the engine's first response to each. The groups that are left when the step is
    full are aborted, scored or not.

    So a step has the same groups however long scoring takes, as long as the engine responds in the same order: this
    depends on the number of tokens alone if all requests are queued before it starts. And all are aborted at once: else
    the rest would share other decode batches from a moment on that depends on the reward functions.

    Everything here runs on the asyncio thread.
    """

    def __init__(self, queue: StoppingSampleQueue) -> None:
        self.over = False
        self._queue = queue
        self._groups: dict[asyncio.Task[None], PromptGroup] = {}
        self._turns: dict[asyncio.Task[None], _Turn] = {}
        self._order: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._unordered: set[asyncio.Task[None]] = set()
        self._num_tokens: Counter[asyncio.Task[None]] = Counter()

    def expect(self, prompt_groups: dict[asyncio.Task[None], PromptGroup]) -> None:
        """The tasks of the generation batch, none of which has run yet, with their groups in order."""
        loop = asyncio.get_running_loop()
        self._groups = prompt_groups
        self._turns = {task: _Turn(loop.create_future()) for task in prompt_groups}

    def begin(self) -> None:
        """The engine is about to generate; all groups have sent their request, or never will."""
        self._unordered = set(self._groups)
        for task, turn in self._turns.items():
            if task.done() or turn.accepted.done():
                self._place(task)
            else:
                task.add_done_callback(self._place)

    def responded(self, task: "asyncio.Task[None] | None", num_tokens: int) -> None:
        """The engine has responded to a request of the group, with this number of tokens."""
        if task in self._groups:
            self._num_tokens[task] += num_tokens
            self._place(task)

    async def turn(self, accepted: bool) -> None:
        """For the calling group's task: returns when the group may pass on; never if the group is not needed.

        accepted: it wants a place in the step; else it is dropped.
        """
        task = asyncio.current_task()
        assert task is not None
        self._turns[task].accepted.set_result(accepted)
        self._place(task)
        await self._turns[task].go.wait()

    async def run(self) -> None:
        """Returns when all groups have passed on, or the step is full. Raises what a group's task raises."""
        surplus: list[asyncio.Task[None]] = []
        for _ in self._groups:
            task = await self._order.get()
            turn = self._turns[task]
            await asyncio.wait((task, turn.accepted), return_when=asyncio.FIRST_COMPLETED)
            if turn.accepted.done() and turn.accepted.result() and not self._queue.has_place(self._groups[task]):
                surplus.append(task)
                continue
            await self._pass(task)
            for waiting in [each for each in surplus if self._queue.has_place(self._groups[each])]:
                surplus.remove(waiting)  # its place was reserved for another, which was dropped
                await self._pass(waiting)
                break
            if self._queue.is_full():
                return

    async def abort(self, calls: PlainCalls) -> list[PromptGroup]:
        """End the groups that have not passed on, with all that they wait for; returns their prompt groups. No sync
        function is left running: nobody could end it, and it would draw from the random generators of later calls."""
        self.over = True
        left = [task for task in self._groups if not task.done()]
        for task in left:
            if task is not calls.caller:
                task.cancel()
        if calls.caller in left:
            async with calls.turn:
                for task in left:
                    task.cancel()
        ended = await asyncio.gather(*left, return_exceptions=True)
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
        return [self._groups[task] for task in left]

    def num_tokens(self, passed: bool) -> int:
        """Of the responses of all groups that have passed on, or of the others."""
        return sum(number for task, number in self._num_tokens.items() if task.cancelled() != passed)

    async def _pass(self, task: "asyncio.Task[None]") -> None:
        self._turns[task].go.set()
        await task

    def _place(self, task: "asyncio.Task[None]") -> None:
        if task in self._unordered:
            self._unordered.remove(task)
            self._order.put_nowait(task)
