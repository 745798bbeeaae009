"""The asyncio thread of a process: the experience plane lives there, the learning plane on the main thread."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopEnded(RuntimeError):
    """The thread ended while something ran there, or was to run: nobody would ever answer."""


class LoopThread:
    """Runs coroutines on a thread of its own. A context manager; leaving cancels what still runs there.

    Should the thread end by itself (a task that raises SystemExit takes its loop with it), whatever it owed an answer
    fails with LoopEnded.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._ended: LoopEnded | None = None
        # Changed by whichever thread asks or answers: `add`, `discard` and `list()` of a set are one step each.
        self._owed: set[concurrent.futures.Future[Any]] = set()

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel_all()
        with suppress(RuntimeError):  # closed already, where the thread ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run to the end and return the result, or raise what it raised."""
        return self.start(work).result()

    def start(self, work: Coroutine[object, object, T]) -> "concurrent.futures.Future[T]":
        """Begin and return at once."""
        with self._lock:  # or the thread could end between the question and the submission: nobody would answer
            if self._ended is not None:
                work.close()
                raise self._ended
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._owed.add(future)
        future.add_done_callback(self._owed.discard)
        return future

    def cancel_all(self) -> None:
        """Cancel everything that runs there, and wait until it has ended."""
        with suppress(LoopEnded):
            self.call(self._cancel_all())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        cause = "it was stopped"
        try:
            self._loop.run_forever()
        except BaseException as err:  # the edge of the thread: whoever waits is told
            cause = f"{type(err).__name__}: {err}"
        with self._lock:
            self._ended = LoopEnded(f"the thread '{self._thread.name}' has ended ({cause})")
        for future in list(self._owed):  # complete: once `_ended` is set, `start` adds no more
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(self._ended)
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
