"""Calls of plain functions from the asyncio thread, each with a deadline that a hang cannot outlive."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

AT_ONCE = 8
T = TypeVar("T")


class PlainCalls:
    """Runs each call on a daemon thread of its own: one that hangs keeps neither a place here nor the process alive.

    The deadline of a call runs from when it gets its place, not while it queues.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def run(self, function: Callable[[], T], deadline_s: float) -> T:
        """What the function returns or raises. Raises TimeoutError after the deadline, and leaves the thread alone."""
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
            return await asyncio.wait_for(future, deadline_s)
