"""The end of a generation batch that has more groups than its step needs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from distflow.runtime.rollout_loop.user_calls import PlainCalls
from distflow.scheduling.group_states import Places, PromptGroup

GroupTask = asyncio.Task[None]


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
        self._groups: dict[GroupTask, PromptGroup] = {}
        self._turns: dict[GroupTask, _Turn] = {}
        self._order: asyncio.Queue[GroupTask] = asyncio.Queue()
        self._unordered: set[GroupTask] = set()

    def expect(self, groups: dict[GroupTask, PromptGroup]) -> None:
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

    def responded(self, task: GroupTask) -> None:
        """The engine has responded to a request of the group."""
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
        surplus = list[GroupTask]()
        for _ in self._groups:
            if self._places.is_full:
                return

            task = await self._order.get()
            turn = self._turns[task]
            await asyncio.wait((task, turn.accepted), return_when=asyncio.FIRST_COMPLETED)
            accepted = turn.accepted.done() and turn.accepted.result()
            if accepted and not self._has_place(task):
                surplus.append(task)
                continue

            await self._pass(task, accepted)

            # a place may have been reserved for a group that was then dropped
            waiting = next(filter(self._has_place, surplus), None)
            if waiting is not None:
                surplus.remove(waiting)
                await self._pass(waiting, accepted=True)

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

    def _has_place(self, task: GroupTask) -> bool:
        return self._places.has_place(self._groups[task])

    async def _pass(self, task: GroupTask, accepted: bool) -> None:
        self._places.end(self._groups[task], accepted)
        self._turns[task].go.set()
        await task

    def _place(self, task: GroupTask) -> None:
        if task in self._unordered:
            self._unordered.remove(task)
            self._order.put_nowait(task)
