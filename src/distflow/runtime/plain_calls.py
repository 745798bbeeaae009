"""Calls of plain functions from the asyncio thread, each with a deadline that a hang cannot outlive."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

AT_ONCE = 8
T = TypeVar("T")


class DeadlinePassed(TimeoutError):
    """A plain function did not return in time; a TimeoutError that it raised itself is not this."""


class PlainCalls:
    """Runs each call on a daemon thread of its own: one that hangs keeps neither a place here nor the process alive.

    The deadline of a call runs from when it gets its place, not while it queues.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def run(self, function: Callable[[], T], deadline_s: float) -> T:
        """What the function returns or raises. Raises DeadlinePassed, and leaves the thread alone."""
        async with self._places:
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
                except SystemExit as err:
                    outcome = partial(future.set_exception, RuntimeError(f"it asked to exit ({err})"))
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
