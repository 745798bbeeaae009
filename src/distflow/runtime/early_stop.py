"""Early stop: a wave of more groups than the step needs ends when the step is full, and the others are aborted."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from distflow.runtime.sample_queue.protocol import StoppingSampleQueue
from distflow.runtime.user_calls.sync_calls import PlainCalls
from distflow.scheduling.groups import PromptGroup


@dataclass
class _Turn:
    """Of one group. accepted: set once it is at the end of its steps, whether it wants a place. go: it may pass on what
    it has made, or that it is dropped."""

    accepted: "asyncio.Future[bool]"
    go: asyncio.Event = field(default_factory=asyncio.Event)


class EarlyStop:
    """Lets the groups of a wave pass to the queue one by one: in the order in which the engine answered them first, and
    before those the ones that asked it nothing, by group. The groups that are left when the step is full are aborted,
    whether they are judged or not.

    So a step is made of the same groups whatever time their verdicts take, as far as the engine answers in the same
    order: it does so by the number of tokens alone, where all requests are there before it starts. And none is aborted
    before all are: those that are left in the engine would share other batches, from a moment on that verifiers decide.

    All of it runs on the asyncio thread.
    """

    def __init__(self, queue: StoppingSampleQueue) -> None:
        self.over = False
        self._edge = queue
        self._tickets: dict[asyncio.Task[None], PromptGroup] = {}
        self._turns: dict[asyncio.Task[None], _Turn] = {}
        self._order: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._unordered: set[asyncio.Task[None]] = set()
        self._num_tokens: Counter[asyncio.Task[None]] = Counter()

    def expect(self, prompt_groups: dict[asyncio.Task[None], PromptGroup]) -> None:
        """The tasks of the wave, of which none has run yet, with their groups in order."""
        loop = asyncio.get_running_loop()
        self._tickets = prompt_groups
        self._turns = {task: _Turn(loop.create_future()) for task in prompt_groups}

    def begin(self) -> None:
        """The engine is about to answer; all groups have asked it, or never will."""
        self._unordered = set(self._tickets)
        for task, turn in self._turns.items():
            if task.done() or turn.accepted.done():
                self._place(task)
            else:
                task.add_done_callback(self._place)

    def answered(self, task: "asyncio.Task[None] | None", num_tokens: int) -> None:
        """The engine has answered a request of the group's, with so many tokens."""
        if task in self._tickets:
            self._num_tokens[task] += num_tokens
            self._place(task)

    async def turn(self, accepted: bool) -> None:
        """Of the group whose task calls: returns when it may pass on, which a group that is not needed never may.

        accepted: it wants a place of the step; else it is dropped.
        """
        task = asyncio.current_task()
        assert task is not None
        self._turns[task].accepted.set_result(accepted)
        self._place(task)
        await self._turns[task].go.wait()

    async def run(self) -> None:
        """Until all groups have passed on, or the step is full. Raises what a group's task raises."""
        surplus: list[asyncio.Task[None]] = []
        for _ in self._tickets:
            task = await self._order.get()
            turn = self._turns[task]
            await asyncio.wait((task, turn.accepted), return_when=asyncio.FIRST_COMPLETED)
            if turn.accepted.done() and turn.accepted.result() and not self._edge.has_place(self._tickets[task]):
                surplus.append(task)
                continue
            await self._pass(task)
            for waiting in [each for each in surplus if self._edge.has_place(self._tickets[each])]:
                surplus.remove(waiting)  # one whose place was kept for another, which was dropped
                await self._pass(waiting)
                break
            if self._edge.is_full():
                return

    async def abort(self, calls: PlainCalls) -> list[PromptGroup]:
        """End the groups that have not passed on, with all that they wait for; their groups. No plain function is left
        running: nobody could end it, and it would draw from random generators that are another's by then."""
        self.over = True
        left = [task for task in self._tickets if not task.done()]
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
        return [self._tickets[task] for task in left]

    def num_tokens(self, passed: bool) -> int:
        """Of the answers of all groups that have passed on, or of the others."""
        return sum(number for task, number in self._num_tokens.items() if task.cancelled() != passed)

    async def _pass(self, task: "asyncio.Task[None]") -> None:
        self._turns[task].go.set()
        await task

    def _place(self, task: "asyncio.Task[None]") -> None:
        if task in self._unordered:
            self._unordered.remove(task)
            self._order.put_nowait(task)
