"""Generation batches: groups that start together, whose requests reach the engine in rounds. So
decode batches do not depend on timing, and a killed and resumed run draws the same samples."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar

from distflow.runtime.rollout_loop.early_stop import EarlyStop, GroupTask

group_task: ContextVar[GroupTask | None] = ContextVar("group_task", default=None)
"""The running group's task; tasks that a node starts (`gather`, `wait_for`) inherit it."""


class GenerationBatch:
    """Holds requests until every group has sent one or makes no more; then all go to the paused
    engine, in the order of groups and samples, before it resumes. A group has no request in the
    engine when it sends those of its next round.

    Everything here runs on the asyncio thread.
    """

    def __init__(
        self,
        tasks: Collection[GroupTask],
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
        early_stop: EarlyStop | None = None,
        in_rounds: bool = False,
    ) -> None:
        """tasks: of the groups, none of which has run yet. pause, resume: the engine. in_rounds:
        later requests are held too, and not only those of the first round."""
        self._order = {task: number for number, task in enumerate(tasks)}
        self._pause = pause
        self._resume = resume
        self._early_stop = early_stop
        self._in_rounds = in_rounds
        self._asking = set(tasks)
        self._held: dict[asyncio.Future[None], tuple[int, int, GroupTask]] = {}
        self._num_released = 0
        self._all_submitted = asyncio.Event()
        self._releasing: asyncio.Task[None] | None = None
        self._has_begun = False
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Set once the engine did not pause or resume, and may no longer answer."""
        for task in tasks:
            task.add_done_callback(self.asks_no_more)

    async def turn(self, task: GroupTask | None, sample: int) -> bool:
        """Returns when the request may go to the engine: whether it was held, so that the engine
        resumes only after `submitted`. Requests of other tasks need not wait."""
        if task is None or task not in self._order or (self._has_begun and not self._in_rounds):
            return False

        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[held] = (self._order[task], sample, task)
        self._look()

        try:
            await held
        except asyncio.CancelledError:
            self._held.pop(held, None)
            if held.done() and not held.cancelled():
                self.submitted()
            raise

        return True

    def submitted(self) -> None:
        """A request that was held is in the engine's queue, or will never be."""
        self._num_released -= 1
        if self._num_released <= 0:
            self._all_submitted.set()

    def responded(self, task: GroupTask) -> None:
        """The engine has responded to a request of the group."""
        if self._early_stop is not None:
            self._early_stop.responded(task)

    def asks_no_more(self, task: GroupTask) -> None:
        """The group has finished all of its nodes."""
        self._asking.discard(task)
        self._look()

    def _look(self) -> None:
        waiting = {task for _, _, task in self._held.values()}
        if self._releasing is not None or not self._asking <= waiting:
            return

        if self._held:
            self._releasing = asyncio.ensure_future(self._release())
        elif not self._has_begun:
            asyncio.get_running_loop().call_soon(self._begin)

    async def _release(self) -> None:
        await asyncio.sleep(0)  # a group sends its requests of a round in one turn of the loop
        await self._attempt(self._pause)

        try:
            held = sorted(self._held.items(), key=lambda item: item[1][:2])
            self._held = {}
            self._num_released = len(held)
            self._all_submitted.clear()
            is_first = not self._has_begun
            self._has_begun = True

            for future, _ in held:
                if not future.done():
                    future.set_result(None)
                else:
                    self.submitted()

            if held:
                await self._all_submitted.wait()
            if is_first and self._early_stop is not None:
                self._early_stop.begin()
        finally:
            await self._attempt(self._resume)
            self._releasing = None
            self._look()

    def _begin(self) -> None:
        """No group sends a request."""
        if not self._has_begun and self._early_stop is not None:
            self._early_stop.begin()
        self._has_begun = True

    async def _attempt(self, change: Callable[[], Awaitable[None]]) -> None:
        (error,) = await asyncio.gather(change(), return_exceptions=True)
        if error is not None and not self.failed.done():
            self.failed.set_result(error)
