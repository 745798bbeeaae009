"""Generation batches: groups that start together. If a batch has more groups than its step needs,
the rest is aborted when the step is full. If groups make several engine requests, these are sent in
rounds, so that decode batches do not depend on timing, and a killed and resumed run draws the same
samples."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from distflow.runtime.rollout_loop.user_calls import PlainCalls
from distflow.scheduling.group_states import Places, PromptGroup

GroupTask = asyncio.Task[None]

group_task: ContextVar[GroupTask | None] = ContextVar("group_task", default=None)
"""The running group's task; tasks that a node starts (`gather`, `wait_for`) inherit it."""


@dataclass
class _Turn:
    """The turn of one group."""

    accepted: "asyncio.Future[bool]"
    """Set after its last node: whether it wants a place in the step."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """It may be queued, or reported as dropped."""


async def cancel(tasks: Sequence[GroupTask], calls: PlainCalls) -> None:
    """Cancel groups; if one is in a sync call, once that has returned."""
    for task in tasks:
        if task is not calls.caller:
            task.cancel()
    if calls.caller in tasks:
        async with calls.turn:
            for task in tasks:
                task.cancel()


class EarlyStop:
    """Passes the groups of a generation batch to the queue one by one: first those without engine
    requests, by group id, then in the order of the engine's first response to each. When the step
    is full, the remaining groups are aborted, scored or not.

    A worker fills the number of places that came with its groups (`Places`), whatever other workers
    do. So a step has the same groups however long scoring takes, as long as each engine responds in
    the same order, which depends only on the number of tokens if all requests are queued before it
    starts. And all are aborted at once: otherwise the timing of reward functions would change the
    decode batches of the rest.

    Everything here runs on the asyncio thread.
    """

    def __init__(self, groups: Sequence[PromptGroup]) -> None:
        self.over = False
        self._places = Places(groups)
        self._groups: dict[asyncio.Task[None], PromptGroup] = {}
        self._turns: dict[asyncio.Task[None], _Turn] = {}
        self._order: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._unordered: set[asyncio.Task[None]] = set()
        self._num_tokens: Counter[asyncio.Task[None]] = Counter()

    def expect(self, groups: dict[asyncio.Task[None], PromptGroup]) -> None:
        """The tasks of the generation batch, none of which has run yet, with their groups in
        order."""
        loop = asyncio.get_running_loop()
        self._groups = groups
        self._turns = {task: _Turn(loop.create_future()) for task in groups}

    def begin(self) -> None:
        """The engine is about to generate; all groups have sent their request, or never will."""
        self._unordered = set(self._groups)
        for task, turn in self._turns.items():
            if task.done() or turn.accepted.done():
                self._place(task)
            else:
                task.add_done_callback(self._place)

    def responded(self, task: "asyncio.Task[None] | None", num_tokens: int) -> None:
        """The engine has responded to a request of the group with this number of tokens."""
        if task in self._groups:
            self._num_tokens[task] += num_tokens
            self._place(task)

    async def turn(self, accepted: bool) -> None:
        """For the calling group's task: returns when the group may pass; never if the group is not
        needed.

        accepted: whether it wants a place in the step, instead of being dropped.
        """
        task = asyncio.current_task()
        assert task is not None
        self._turns[task].accepted.set_result(accepted)
        self._place(task)
        await self._turns[task].go.wait()

    async def run(self) -> None:
        """Returns when all groups have passed, or the step is full. Raises what a group's task
        raises."""
        surplus: list[asyncio.Task[None]] = []
        for _ in () if self._places.is_full else self._groups:
            task = await self._order.get()
            turn = self._turns[task]
            await asyncio.wait((task, turn.accepted), return_when=asyncio.FIRST_COMPLETED)
            accepted = turn.accepted.done() and turn.accepted.result()
            if accepted and not self._places.has_place(self._groups[task]):
                surplus.append(task)
                continue
            await self._pass(task, accepted)
            for waiting in [each for each in surplus if self._places.has_place(self._groups[each])]:
                surplus.remove(waiting)  # its place was reserved for a group that was then dropped
                await self._pass(waiting, accepted=True)
                break
            if self._places.is_full:
                return

    async def abort(self, calls: PlainCalls) -> list[PromptGroup]:
        """End the groups that have not passed, and everything that they wait for; returns them. No
        sync function is left running: it could not be ended, and would draw from the random
        generators of later calls."""
        self.over = True
        left = [task for task in self._groups if not task.done()]
        await cancel(left, calls)
        ended = await asyncio.gather(*left, return_exceptions=True)
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
        return [self._groups[task] for task in left]

    def num_tokens(self, passed: bool) -> int:
        """The number of tokens of the groups that have passed, or of the others."""
        return sum(
            number for task, number in self._num_tokens.items() if task.cancelled() != passed
        )

    async def _pass(self, task: "asyncio.Task[None]", accepted: bool) -> None:
        self._places.end(self._groups[task], accepted)
        self._turns[task].go.set()
        await task

    def _place(self, task: "asyncio.Task[None]") -> None:
        if task in self._unordered:
            self._unordered.remove(task)
            self._order.put_nowait(task)


class Rounds:
    """Holds requests until every group of the generation batch has sent one or is done; then all go
    to the paused engine, in the order of groups and samples, before it resumes. The first round is
    the batch's start, which is not held. A group has no request in the engine when it sends those
    of its next round.

    failed: set once the engine did not pause or resume, and may no longer answer. Everything here
    runs on the asyncio thread.
    """

    def __init__(
        self,
        tasks: Collection[GroupTask],
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self._order = {task: number for number, task in enumerate(tasks)}
        self._pause = pause
        self._resume = resume
        self._asking = set(tasks)
        self._begun = set[GroupTask]()
        self._held: dict[asyncio.Future[None], tuple[int, int, GroupTask]] = {}
        self._num_released = 0
        self._all_submitted = asyncio.Event()
        self._releasing: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        for task in tasks:
            task.add_done_callback(self.left)

    async def turn(self, task: GroupTask | None, sample: int) -> None:
        """Returns when the request may go to the engine. Requests of other tasks need not wait."""
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
            # after the other groups of its first round
            asyncio.get_running_loop().call_soon(self._begun.add, task)

    def left(self, task: GroupTask | None) -> None:
        """The group makes no further requests."""
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
        await asyncio.sleep(0)  # a group sends its requests of a round in one turn of the loop
        await self._attempt(self._pause)
        try:
            held = sorted(self._held.items(), key=lambda item: item[1][:2])
            self._held = {}
            self._num_released = len(held)
            self._all_submitted.clear()
            for future, _ in held:
                if not future.done():
                    future.set_result(None)
                else:
                    self._submitted()
            if held:
                await self._all_submitted.wait()
        finally:
            await self._attempt(self._resume)
            self._releasing = None
            self._look()

    async def _attempt(self, change: Callable[[], Awaitable[None]]) -> None:
        (error,) = await asyncio.gather(change(), return_exceptions=True)
        if error is not None and not self.failed.done():
            self.failed.set_result(error)


class GenerationBatch:
    """Groups that start together: which of them have sent their request, or ended without one.

    Everything here runs on the asyncio thread.
    """

    def __init__(
        self,
        tasks: Collection[GroupTask],
        early_stop: EarlyStop | None,
        rounds: Rounds | None,
    ) -> None:
        """rounds: None sends later requests at once."""
        self._early_stop = early_stop
        self._rounds = rounds
        self._waiting: set[GroupTask | None] = set(tasks)
        self._all_in = asyncio.Event()
        for task in tasks:
            # a task that ends without a request must not be waited for
            task.add_done_callback(self._arrived)

    @property
    def failed(self) -> "asyncio.Future[BaseException] | None":
        """Set once the engine did not begin or end a round, and may no longer answer."""
        return None if self._rounds is None else self._rounds.failed

    async def all_in(self) -> None:
        """Wait until every group has sent its request, or needs none."""
        if self._waiting:
            await self._all_in.wait()

    async def turn(self, sample: int) -> None:
        """Returns when the running group's request for the sample may go to the engine."""
        if self._rounds is not None:
            await self._rounds.turn(group_task.get(), sample)

    def submitted(self, task: GroupTask | None) -> None:
        """A request of the group is in the engine's queue."""
        self._arrived(task)
        if self._rounds is not None:
            self._rounds.submitted(task)

    def responded(self, task: GroupTask | None, num_tokens: int) -> None:
        """The engine has responded to a request of the group."""
        if self._early_stop is not None:
            self._early_stop.responded(task, num_tokens)

    def asks_no_more(self, task: GroupTask | None) -> None:
        """The group has finished all of its nodes."""
        self._arrived(task)
        if self._rounds is not None:
            self._rounds.left(task)

    def _arrived(self, task: GroupTask | None) -> None:
        self._waiting.discard(task)
        if not self._waiting:
            self._all_in.set()
