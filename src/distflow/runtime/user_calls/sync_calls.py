"""Calls of sync functions from the asyncio thread, each with a deadline, and of the user's callbacks, which can neither
end a run nor change its random generators."""

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from distflow.data import random_states
from distflow.errors import UserError
from distflow.import_target import LoadError, is_async, users_code
from distflow.runtime.loop_thread import on_a_thread

T = TypeVar("T")


class DeadlinePassed(TimeoutError):
    """A function did not return in time; a TimeoutError that it raised itself is not this. Its text continues the
    message with further observations."""


class PlainCalls:
    """Runs each call on a daemon thread of its own: one that hangs does not keep the process alive.

    turn: held while a call runs. One runs at a time, since the global random generators are the process's: while a call
    has its own there, no other function of the user's may draw. The deadline of a call starts when it has its turn.
    caller: the task of the running call.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.caller: asyncio.Task[object] | None = None

    async def run(self, function: Callable[[], T], deadline_s: float, *identity: object) -> T:
        """Returns or raises what the function does. Raises DeadlinePassed, and abandons the thread.

        identity: of the call, by which its random generators are seeded.
        """
        async with self.turn:
            self.caller = asyncio.current_task()
            try:
                with random_states.lent(random_states.seeded(*identity)):
                    return await _in_a_thread(function, deadline_s)
            finally:
                self.caller = None


async def _in_a_thread(function: Callable[[], T], deadline_s: float) -> T:
    context = contextvars.copy_context()

    def work() -> T:
        try:
            return context.run(function)
        except StopIteration as err:  # a future rejects it
            raise RuntimeError(f"StopIteration: {err}") from None
        except (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError) as err:
            error = RuntimeError(f"it asked to exit ({err!r})")
            raise error.with_traceback(err.__traceback__) from None  # which names the place

    call = on_a_thread(work, "node")
    future = asyncio.wrap_future(call)
    try:
        await asyncio.wait((future,), timeout=deadline_s)
        if not future.done():
            raise DeadlinePassed
        future.exception()  # which is then retrieved; of a TimeoutError it is a copy without its place
        return call.result()
    finally:
        future.cancel()  # no effect if it is done


@dataclass(frozen=True)
class Callbacks:
    """Each is called on the training thread, which waits for it.

    on_step, on_validation: with the step, counted from 1 (0: before training), and its metrics by their flat names.
    on_save: with the step and the folder of its checkpoint.
    Raises UserError for one that cannot be called so.
    """

    on_step: Callable[[int, dict[str, float]], object] | None = None
    on_validation: Callable[[int, dict[str, float]], object] | None = None
    on_save: Callable[[int, Path], object] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            function, second = getattr(self, field.name), "checkpoint" if field.name == "on_save" else "metrics"
            if function is not None and not _takes_two(function):
                raise UserError(f"{field.name} must be a synchronous function that is called with (step, {second})")


class Caller:
    """Calls callbacks; an error in one becomes a warning, and the run continues. timed: entered around each call."""

    def __init__(
        self,
        callbacks: Callbacks,
        warn: Callable[[str], None],
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._callbacks, self._warn, self._timed = callbacks, warn, timed

    def call(self, name: str, step: int, result: dict[str, float] | Path) -> None:
        """name: of one of the `Callbacks`, which may be missing. result: metrics or a checkpoint's folder."""
        function = getattr(self._callbacks, name)
        if function is None:
            return
        own = getattr(function, "__name__", type(function).__name__)
        try:
            with users_code(f"{name}: {own} raised"), self._timed(), random_states.lent(random_states.states()):
                function(step, result)
        except LoadError as error:
            self._warn(f"{error}; the run continues")


def _takes_two(function: object) -> bool:
    if not callable(function) or is_async(function):
        return False
    try:
        inspect.signature(function).bind(0, {})
    except TypeError:
        return False
    except ValueError:  # a C function may have no signature
        return True
    return True
