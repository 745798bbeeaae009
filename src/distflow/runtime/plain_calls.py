"""Calls of plain functions from the asyncio thread, each with a deadline that a hang cannot outlive."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from distflow.data import generators

T = TypeVar("T")


class DeadlinePassed(TimeoutError):
    """A function did not return in time; a TimeoutError that it raised itself is not this. Its text goes on from that
    with what else was seen."""


class PlainCalls:
    """Runs each call on a daemon thread of its own: one that hangs does not keep the process alive.

    turn: held while a call runs. One runs at a time, for the global random generators are the process's: while a call
    has its own there, no other function of the user's may draw. The deadline of a call runs from when it has its turn.
    caller: the task whose call runs.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.caller: asyncio.Task[object] | None = None

    async def run(self, function: Callable[[], T], deadline_s: float, *identity: object) -> T:
        """What the function returns or raises. Raises DeadlinePassed, and leaves the thread alone.

        identity: of the call, by which its random generators are seeded.
        """
        async with self.turn:
            self.caller = asyncio.current_task()
            try:
                with generators.lent(generators.seeded(*identity)):
                    return await _in_a_thread(function, deadline_s)
            finally:
                self.caller = None


async def _in_a_thread(function: Callable[[], T], deadline_s: float) -> T:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():  # it is once the deadline has passed
            outcome()

    def work() -> None:
        outcome: Callable[[], None]
        try:
            outcome = partial(future.set_result, context.run(function))
        except StopIteration as err:  # no future takes one
            outcome = partial(future.set_exception, RuntimeError(f"StopIteration: {err}"))
        except (SystemExit, KeyboardInterrupt) as err:
            told = RuntimeError(f"it asked to exit ({err!r})").with_traceback(err.__traceback__)  # names the place
            outcome = partial(future.set_exception, told)
        except Exception as err:  # the edge of a user's code
            outcome = partial(future.set_exception, err)
        if not loop.is_closed():  # a future is its loop's own: only the loop's thread may settle it
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="node", daemon=True).start()
    try:
        await asyncio.wait((future,), timeout=deadline_s)
        if not future.done():
            raise DeadlinePassed
        return future.result()
    finally:
        future.cancel()  # nothing to one that is done
