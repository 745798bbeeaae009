"""Calls of a user's functions from the asyncio thread, each with a deadline and its own random
generators.

A sync function runs on its own thread, an async one on the asyncio thread, between awaits of other
tasks. So the deadline of an async function excludes time spent waiting for us (an engine's response
may take long), and its generators are set whenever it runs, and reset when it awaits.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from types import coroutine
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from distflow.data import global_random_states
from distflow.observe.writing.timing import group_waits
from distflow.runtime.rollout_loop.loop_thread import on_a_thread

T = TypeVar("T")
Work = Coroutine[Any, Any, T]

_NUM_END_POLLS = 20
_END_POLL_S = 0.05
_MIN_POLL_S = 0.02
"""Shortest interval between two checks of a call that is near its deadline while it waits for
us."""


class DeadlinePassed(TimeoutError):
    """A function did not return in time (as opposed to a TimeoutError that it raised itself). The
    text adds observations to the message."""


class PlainCalls:
    """Runs each call on its own daemon thread, so that a hanging one does not keep the process
    alive.

    turn: held while a call runs. One runs at a time, since random generators are global to the
    process: while a call has set its own, no other user function may draw. The deadline of a call
    starts with its turn. caller: the task of the running call.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.caller: asyncio.Task[object] | None = None

    async def run(self, function: Callable[[], T], deadline_s: float, *identity: object) -> T:
        """Returns or raises what the function does. Raises DeadlinePassed, and abandons the thread.

        identity: of the call, which seeds its random generators.
        """
        async with self.turn:
            self.caller = asyncio.current_task()
            try:
                with global_random_states.lent(partial(global_random_states.seed, *identity)):
                    return await _in_a_thread(function, deadline_s)
            finally:
                self.caller = None


async def _in_a_thread(function: Callable[[], T], deadline_s: float) -> T:
    context = copy_context()

    def work() -> T:
        try:
            return context.run(function)
        except StopIteration as err:  # a future rejects StopIteration
            raise RuntimeError(f"StopIteration: {err}") from None
        except Exception:
            raise
        except BaseException as err:
            error = RuntimeError(f"it asked to exit ({err!r})")
            raise error.with_traceback(err.__traceback__) from None  # its traceback names the place

    call = on_a_thread(work, "node")
    future = asyncio.wrap_future(call)
    try:
        await asyncio.wait((future,), timeout=deadline_s)
        if not future.done():
            raise DeadlinePassed
        # marks it as retrieved; for a TimeoutError it is a copy without traceback
        future.exception()
        return call.result()
    finally:
        future.cancel()  # no effect if it is done


class _Clock:
    """Counts the time of a call. For one thread."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._spent_s = 0.0
        self._num_stops = 0

    def spent_s(self) -> float:
        return self._spent_s + (0.0 if self._num_stops else time.monotonic() - self._since)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._spent_s = self.spent_s()
        self._num_stops = self._num_stops + 1

        try:
            yield
        finally:
            self._num_stops -= 1
            self._since = time.monotonic()


class _Strand:
    """A task of a call; each has its own random generators, so that the order in which tasks
    continue does not matter.

    turn: held to draw or seed. identity: of the call, and the path of child numbers to this task.
    clock, tasks: of the call. drawn: the state of its generators; None until it runs.
    """

    def __init__(
        self,
        turn: asyncio.Lock,
        identity: tuple[object, ...],
        clock: _Clock,
        tasks: "WeakSet[asyncio.Task[Any]]",
    ) -> None:
        self.turn = turn
        self.identity = identity
        self.clock = clock
        self.tasks = tasks
        self.drawn: global_random_states.States | None = None
        self._num_children = 0

    def child(self) -> "_Strand":
        self._num_children += 1
        return _Strand(self.turn, (*self.identity, self._num_children), self.clock, self.tasks)

    def set_generators(self) -> None:
        if self.drawn is None:
            global_random_states.seed(*self.identity)
        else:
            global_random_states.put_back(self.drawn)


_strand: ContextVar[_Strand | None] = ContextVar("strand", default=None)
"""The running task, if it is the user's; tasks that it starts (`gather`, `wait_for`) are its
children."""


async def run_async(
    function: Callable[[], Awaitable[T]], deadline_s: float, turn: asyncio.Lock, *identity: object
) -> T:
    """Returns or raises what the function does. Its deadline, and cancelling the call, cancel all
    tasks that it has started; after DeadlinePassed nobody waits for them any more.

    turn: of `PlainCalls`. identity: of the call, which seeds its random generators.
    """
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_task)
    clock = _Clock()
    context = copy_context()
    tasks = WeakSet[asyncio.Task[Any]]()
    context.run(_strand.set, _Strand(turn, identity, clock, tasks))
    task = loop.create_task(_awaited(function), context=context)
    task.add_done_callback(_retrieve_error)  # this call may be cancelled when it has just failed

    try:
        while not task.done() and (left_s := deadline_s - clock.spent_s()) > 0:
            await asyncio.wait((task,), timeout=max(left_s, _MIN_POLL_S))

        if not task.done():
            await _end(tasks)
            raise DeadlinePassed(
                "" if task.done() else ", suppresses its cancellation and was abandoned"
            )

        returned = task.result()
    except asyncio.CancelledError:
        await _end(tasks)
        raise
    finally:
        task.cancel()  # no effect if it is done

    if isinstance(returned, _Exit):
        raise returned.error
    return returned


async def _end(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks, and wait for at most a second, counted in polls, so that a stopped or starved
    process is not taken for a task that swallows its cancellation."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
        task.add_done_callback(_retrieve_error)

    for _ in range(_NUM_END_POLLS):
        left = [task for task in left if not task.done()]
        if not left:
            return
        await asyncio.wait(left, timeout=_END_POLL_S)


@contextmanager
def deadline_paused(on: str = "") -> Iterator[None]:
    """For a user's function that awaits our code: its clock is stopped, and new tasks do not count
    as its own. on: whom the prompt group waits for, to be recorded."""
    strand = _strand.get()
    if strand is None:
        with group_waits(on, on):
            yield
        return

    _strand.set(None)
    with strand.clock.stopped(), group_waits(on, on):
        try:
            yield
        finally:
            _strand.set(strand)


@dataclass(frozen=True)
class _Exit:
    """Returned in place of an exception that a task must not raise, as it would end the loop."""

    error: BaseException


async def _awaited(function: Callable[[], Awaitable[T]]) -> T | _Exit:
    process = os.getpid()
    try:
        return await function()
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as err:
        if os.getpid() != process:
            _end_fork()
        return _Exit(err)


def _retrieve_error(task: "asyncio.Task[Any]") -> None:
    """Retrieve an exception that nobody waits for; asyncio would complain otherwise."""
    if not task.cancelled():
        task.exception()


def _task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    """The loop's task factory: tasks of a user's call become strands of it."""
    context = options.pop("context", None) or copy_context()
    parent = context.get(_strand)
    if parent is not None:
        own = parent.child()
        context.run(_strand.set, own)
        work = _with_its_draws(work, own)

    task = asyncio.Task(work, loop=loop, context=context, **options)
    if parent is not None:
        parent.tasks.add(task)
    return task


async def _with_its_draws(work: Work[T], strand: _Strand) -> T:
    try:
        return await _steps(work, strand)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as err:  # from a task that the user's function started
        raise RuntimeError(f"it asked to exit ({err!r})") from err


@coroutine
def _steps(work: Work[T], strand: _Strand) -> Generator[Any, Any, T]:
    """Runs the work from await to await. While running it holds the turn, and has its generators
    set."""
    resume = partial(work.send, None)
    process = os.getpid()

    while True:
        try:
            with strand.clock.stopped():
                yield from strand.turn.acquire().__await__()
        except asyncio.CancelledError as err:  # passed to the work when it has its turn
            resume = partial(work.throw, err)
            continue

        try:
            with global_random_states.lent(strand.set_generators):
                try:
                    waits_for = resume()
                finally:
                    if os.getpid() != process:
                        _end_fork()
                    strand.drawn = global_random_states.states()
        except StopIteration as end:
            return end.value
        finally:
            strand.turn.release()

        try:
            resume = partial(work.send, (yield waits_for))
        except BaseException as err:  # any error of the awaited future, for the work to handle
            resume = partial(work.throw, err)


def _end_fork() -> NoReturn:
    """End a process that the user's code forked and did not end, which would go on as a second
    run."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        os._exit(error.code or 0)
    os._exit(1)
