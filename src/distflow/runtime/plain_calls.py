"""Calls of plain functions from the asyncio thread, each with a deadline that a hang cannot outlive."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

AT_ONCE = 8


class PlainCalls:
    """Runs each call on a daemon thread of its own: one that hangs keeps neither a place here nor the process alive.

    The deadline of a call runs from when it gets its place, not while it queues.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def run(self, function: Callable[[], Any], deadline_s: float) -> Any:
        """What the function returns or raises. Raises TimeoutError after the deadline, and leaves the thread alone."""
        async with self._places:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            context = contextvars.copy_context()

            def deliver(result: Any, error: BaseException | None) -> None:
                if future.done():
                    return
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

            def work() -> None:
                result, error = None, None
                try:
                    result = context.run(function)
                except Exception as err:  # the edge of a user's code
                    error = RuntimeError(f"StopIteration: {err}") if isinstance(err, StopIteration) else err
                except SystemExit as err:
                    error = RuntimeError(f"it asked to exit ({err})")
                if not loop.is_closed():  # a future is its loop's own: only the loop's thread may settle it
                    loop.call_soon_threadsafe(deliver, result, error)

            threading.Thread(target=work, name="node", daemon=True).start()
            return await asyncio.wait_for(future, deadline_s)
