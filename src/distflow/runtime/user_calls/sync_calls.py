"""Calls of sync functions from the asyncio thread, each with a deadline, and of a user's callbacks, which can neither
end a run nor change its random generators."""

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from distflow.data import random_states
from distflow.errors import UserError
from distflow.import_target import LoadError, is_async, users_code
from distflow.runtime.loop_thread import on_a_thread

T = TypeVar("T")


class DeadlinePassed(TimeoutError):
    """A function did not return in time (as opposed to a TimeoutError that it raised itself). The text adds
    observations to the message."""


class PlainCalls:
    """Runs each call on its own daemon thread, so that a hanging one does not keep the process alive.

    turn: held while a call runs. One runs at a time, since random generators are global to the process: while a call
    has set its own, no other user function may draw. The deadline of a call starts with its turn. caller: the task of
    the running call.
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
                with random_states.lent(partial(random_states.seed, *identity)):
                    return await _in_a_thread(function, deadline_s)
            finally:
                self.caller = None


async def _in_a_thread(function: Callable[[], T], deadline_s: float) -> T:
    context = contextvars.copy_context()

    def work() -> T:
        try:
            return context.run(function)
        except StopIteration as err:  # a future rejects StopIteration
            raise RuntimeError(f"StopIteration: {err}") from None
        except (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError) as err:
            error = RuntimeError(f"it asked to exit ({err!r})")
            raise error.with_traceback(err.__traceback__) from None  # its traceback names the place

    call = on_a_thread(work, "node")
    future = asyncio.wrap_future(call)
    try:
        await asyncio.wait((future,), timeout=deadline_s)
        if not future.done():
            raise DeadlinePassed
        future.exception()  # marks it as retrieved; for a TimeoutError it is a copy without traceback
        return call.result()
    finally:
        future.cancel()  # no effect if it is done


@dataclass(frozen=True)
class Callbacks:
    """A user's callbacks, called on the training thread, which waits for them.

    on_step, on_validation: called with the step, counted from 1 (0: before training), and its metrics by flat names.
    on_save: called with the step and the folder of its checkpoint. Raises UserError for one that cannot be called so.
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
        """name: of one of the `Callbacks`, possibly unset. result: metrics or a checkpoint's folder."""
        function = getattr(self._callbacks, name)
        if function is None:
            return
        own = getattr(function, "__name__", type(function).__name__)
        try:
            with users_code(f"{name}: {own} raised"), self._timed(), random_states.lent():
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
