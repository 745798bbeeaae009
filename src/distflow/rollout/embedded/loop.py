"""The thread of the embedded engine: it steps while there is work, and runs everything else between two steps.

OpenMP keeps a pool of threads for each thread that ever computed, for as long as that one lives, and two pools on the
same cores slow each other down even when one of them is idle (measured: 25 k tokens/s alone, 15 k beside the idle
pool of the main thread). So the thread that computes lives only while there is something to do.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class StepLoop:
    """Consumes commands, then steps; waits for a command where there is nothing to step or the loop is paused;
    unblocked by `post`; produces what `step` does. Commands and steps never overlap, so the engine needs no lock.
    """

    def __init__(
        self, name: str, step: Callable[[], None], has_work: Callable[[], bool], fail: Callable[[Exception], None]
    ) -> None:
        """fail: told the exception of a step or a posted command; the loop goes on after it."""
        self.paused = False
        self._step = step
        self._has_work = has_work
        self._fail = fail
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._name = name
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        # Set on the busy thread, read on asyncio's, as `stop` is run: it does what was posted in between.
        return self._thread.is_alive() and not self._stopping

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` between two steps; nobody waits for it, so what it raises is treated as a step's failure."""
        if not self.running:
            raise RuntimeError("the rollout engine is not running: use it inside `async with engine:`")
        self._commands.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """Run `command` between two steps and wait for its result or exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = command()
            except Exception as error:  # the thread's edge: whoever waits gets it
                settle(loop, future, error)
            else:
                settle(loop, future, result)

        self.post(run)
        return await future

    async def stop(self) -> None:
        """End after the step that runs; commands posted meanwhile are still done, so that none waits for ever."""

        def end() -> None:
            self._stopping = True

        await self.call(end)
        self._thread.join()
        # The engine's threads have ended, so these too overlap with nothing.
        while not self._commands.empty():
            self._attempt(self._commands.get())

    def _run(self) -> None:
        """Wait for commands; leave all computing, theirs included, to a thread that ends when it has no more to do."""
        while not self._stopping:
            command = self._commands.get()
            busy = threading.Thread(target=self._work, args=(command,), name=f"{self._name}-busy", daemon=True)
            busy.start()
            busy.join()

    def _work(self, command: Callable[[], None]) -> None:
        self._attempt(command)
        while not self._stopping:
            if not self._commands.empty():
                self._attempt(self._commands.get())
            elif self.paused or not self._has_work():
                return
            else:
                self._attempt(self._step)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # the thread's edge: every waiting request gets it
            self._fail(error)


def settle(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    """Give a future of another thread's loop its result or exception, unless nobody waits for it any more."""

    def deliver() -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    if not loop.is_closed():  # a future is its loop's own: only the loop's thread may settle it
        loop.call_soon_threadsafe(deliver)
