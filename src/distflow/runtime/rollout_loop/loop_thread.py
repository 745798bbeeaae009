"""The asyncio thread of a process, which runs the rollout loop (the training loop is on the main
thread), and threads for single calls that may hang."""

import asyncio
import concurrent.futures
import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from distflow.errors import UserError, users_place_of

T = TypeVar("T")

LEAVES_WITHIN_S = 5.0
_POLL_S = 0.25


class LoopEnded(RuntimeError):
    """The thread ended while a call was running or queued there, whose result would never come."""


class LoopGivenUp(LoopEnded):
    """The thread, or what it waits for, does not end; it is abandoned, and the process must end
    without it."""


class LoopBlocked(LoopGivenUp, UserError):
    """A user's function blocks the thread, so that nothing else runs there."""


class LoopThread:
    """Runs coroutines on a separate thread. A context manager; leaving it cancels what still runs
    there, and waits at most `LEAVES_WITHIN_S` for tasks that swallow the cancellation.

    If the thread ends by itself (a task that raises SystemExit ends its loop), all open calls fail
    with LoopEnded; if a user's code blocks it for `blocked_after_s`, with LoopBlocked.
    """

    def __init__(self, name: str, blocked_after_s: float = math.inf) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._blocked_after_s = blocked_after_s
        self._lock = threading.Lock()
        self._ended: LoopEnded | None = None

        # Maps each result's future to what computes it: asyncio references tasks weakly, and a
        # waiting task without other references would be collected. Any thread may change it: each
        # change of a dict is atomic.
        self._owed: dict[concurrent.futures.Future[Any], concurrent.futures.Future[Any]] = {}

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        if math.isfinite(self._blocked_after_s):
            threading.Thread(
                target=self._watch, name=f"{self._thread.name}-watch", daemon=True
            ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel_all()
        with suppress(RuntimeError):  # already closed if the thread ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        if not isinstance(self._ended, LoopGivenUp):
            self._thread.join()

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run to the end and return the result, or raise what it raised."""
        return self.start(work).result()

    def start(self, work: Coroutine[object, object, T]) -> "concurrent.futures.Future[T]":
        # else the thread could end between check and submission, and no result would come
        with self._lock:
            if self._ended is not None:
                work.close()
                raise self._ended
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
            result: concurrent.futures.Future[T] = concurrent.futures.Future()
            self._owed[result] = done

        result.add_done_callback(self._owed.pop)
        done.add_done_callback(partial(_settle, result))
        return result

    def cancel_all(self) -> None:
        """Cancel everything on the thread, and wait until it has ended."""
        with suppress(LoopEnded):
            self.call(self._cancel_all())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        # Inherited by threads and processes that the user's code starts here: Ctrl-C is for the
        # run, which ends them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _keep_to_one_core()

        cause = "it was stopped"
        try:
            self._loop.run_forever()
        except BaseException as err:  # the thread's boundary: whoever waits gets the error
            cause = f"{type(err).__name__}: {err}"
        finally:
            self.end(LoopEnded(f"the thread '{self._thread.name}' has ended ({cause})"))
            for task in asyncio.all_tasks(self._loop):
                _leave(task)
            self._loop.close()

    def end(self, error: LoopEnded) -> None:
        """Give up on the thread: open and later calls fail."""
        with self._lock:
            self._ended = self._ended or error
        for future in list(self._owed):  # complete: once `_ended` is set, `start` adds no more
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(self._ended)

    def _watch(self) -> None:
        """Ask the thread to tick until it ends. If it does not tick while it runs user code, it is
        abandoned.

        Time is counted in polls, so a stopped process does not use it up.
        """
        assert self._thread.ident is not None
        while self._ended is None:
            ticked = threading.Event()
            blocked_s = 0.0
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(ticked.set)

            while not ticked.wait(_POLL_S) and self._ended is None:
                place = users_place_of(self._thread.ident)

                # our own code runs, and will end
                if place is None:
                    blocked_s = 0.0
                    continue

                blocked_s += _POLL_S
                if blocked_s > self._blocked_after_s:
                    error = LoopBlocked(
                        "an async function has blocked everything else for "
                        f"{self._blocked_after_s:g} s (at {place}): it must await instead of "
                        "blocking, or be a synchronous function, which gets its own thread "
                        "(reward.timeout_s for each sample)"
                    )
                    self.end(error)

            time.sleep(_POLL_S)

    async def _cancel_all(self) -> None:
        others = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=LEAVES_WITHIN_S)


def on_a_thread(blocking: Callable[[], T], name: str = "waits") -> "concurrent.futures.Future[T]":
    """Call a function on a new daemon thread, which does not keep the process alive if it hangs."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    # from now on only the call settles it, and it cannot be cancelled
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(blocking())
        except BaseException as err:  # the thread's boundary: whoever waits gets the error
            future.set_exception(err)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _keep_to_one_core() -> None:
    """Limit this thread alone to one core: PyTorch's own call would affect later threads too.

    A second thread that computes on all cores has a second OpenMP pool, and if pools have more
    threads than there are cores, OpenMP lets threads sleep between operations: a decode step of few
    rows took three times as long.
    """
    import torch  # here: the command line imports this module for its errors, and must start fast
    from threadpoolctl import threadpool_limits

    # initialises this thread's number now, which would otherwise happen later
    torch.get_num_threads()
    threadpool_limits(1, user_api="openmp")


def _settle(result: "concurrent.futures.Future[T]", done: "concurrent.futures.Future[T]") -> None:
    """Forward the outcome, unless nobody is waiting."""
    with suppress(concurrent.futures.InvalidStateError):
        if done.cancelled():
            result.cancel()
        elif (error := done.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(done.result())


def _leave(task: "asyncio.Task[Any]") -> None:
    """Leave a task that swallows its cancellation. It is never freed, which would run its code
    again."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
