"""The embedded engine's thread: it steps while there is work, and runs everything else between two
steps.

OpenMP keeps a pool of threads for each thread that ever computed, as long as it lives, and two
pools on the same cores slow each other down even if one is idle (measured: 25 k tokens/s alone, 15
k beside the idle pool of the main thread). So on a CPU the loop computes on an idle thread that a
host lends with its pool, or else on a thread that lives only while there is work. On an accelerator
it computes on its own thread: CUDA's libraries keep plans and handles per thread, and create them
for each new one (50 ms per prefill, measured).
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import torch

from distflow.rollout.engine import Host

T = TypeVar("T")


class StepLoop:
    """Runs commands, then steps; if it is paused or has no work, it waits for `post`. Commands and
    steps never overlap, so the engine needs no lock.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        has_work: Callable[[], bool],
        fail: Callable[[Exception], None],
        num_threads: int | None = None,
        on_cpu: bool = True,
    ) -> None:
        """fail: called with the exception of a step or a posted command; the loop continues after
        it. num_threads: of torch, if no host lends a thread; None leaves the number unchanged.
        on_cpu: whether steps compute on the CPU."""
        self.paused = False
        self._step = step
        self._has_work = has_work
        self._fail = fail
        self._num_threads = num_threads
        self._on_cpu = on_cpu
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._posted = threading.Event()
        self._stopping = False
        self._name = name
        self._host: Host | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, host: Host | None = None) -> None:
        """host: None makes the loop compute on its own threads."""
        self._host = host if self._on_cpu else None
        self._thread.start()

    @property
    def running(self) -> bool:
        # Set on the computing thread, read on asyncio's by `stop`, which runs what was posted in
        # between.
        return self._thread.is_alive() and not self._stopping

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` between two steps without waiting for it; its exception is treated as a
        step's failure."""
        if not self.running:
            raise RuntimeError(
                "the rollout engine is not running: use it inside `async with engine:`"
            )
        self._commands.put(command)
        self._posted.set()

    async def call(self, command: Callable[[], T]) -> T:
        """Run `command` between two steps and wait for its result or exception."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.post(lambda: settle(future, outcome_of(command)))
        return await future

    async def stop(self) -> None:
        """End after the current step; commands posted meanwhile still run, so that none waits
        forever."""

        def end() -> None:
            self._stopping = True

        await self.call(end)
        self._thread.join()

        # The engine's threads have ended, so these do not overlap with anything either.
        while not self._commands.empty():
            self.attempt(self._commands.get())

    def _run(self) -> None:
        """Wait for something to do; on a CPU, leave all computation, including commands, to the
        host's idle thread, else to a thread that ends when there is no more."""
        while not self._stopping:
            # A thread that was needed elsewhere may have left commands.
            if self._commands.empty() and not self._can_step():
                self._posted.wait()
            self._posted.clear()  # before the commands are read, so that later ones are not missed

            if not self._on_cpu:
                self._work_alone()
            elif self._host is None or not self._host.compute(self._work):
                busy = threading.Thread(
                    target=self._work_alone, name=f"{self._name}-busy", daemon=True
                )
                busy.start()
                busy.join()

    def _can_step(self) -> bool:
        return not self.paused and self._has_work()

    def _work_alone(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # for this thread

        try:
            self._work(lambda: self._host is not None and self._host.waits)
        # no request may wait forever
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            self.paused = False
            self._fail(RuntimeError(f"{type(error).__name__}: {error}"))

    def _work(self, ends: Callable[[], bool]) -> None:
        """Run commands and steps while there are any, and until this thread is needed elsewhere or
        a host has one to lend."""
        while not self._stopping and not ends():
            if not self._commands.empty():
                self.attempt(self._commands.get())
            elif self._can_step():
                self.attempt(self._step)
            else:
                return

    def attempt(self, action: Callable[[], None]) -> None:
        """Run an action on the computing thread; every waiting request gets its error."""
        is_done = False
        try:
            outcome = outcome_of(action)
            is_done = True
        finally:
            # the thread is interrupted or ended: nothing can continue from half-done work
            if not is_done:
                self.paused = True

        if isinstance(outcome, Exception):
            self._fail(outcome)


def outcome_of(action: Callable[[], T]) -> T | Exception:
    """The action's result, or the exception that it raised."""
    try:
        return action()
    # code of a model, tokenizer or sender may raise anything; the loop continues
    except Exception as error:
        return error


def settle(future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    """Set the result or exception of a future of another thread's loop, unless nobody waits for it
    any more."""
    loop = future.get_loop()

    def deliver() -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    if not loop.is_closed():  # only its loop's thread may settle a future
        loop.call_soon_threadsafe(deliver)
