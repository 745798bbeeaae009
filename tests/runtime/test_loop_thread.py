"""The asyncio thread: what it owes an answer gets one, also where it dies."""

import asyncio
import threading

import pytest

from distflow.runtime.loop_thread import LoopEnded, LoopThread


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def for_ever() -> None:
    await asyncio.Event().wait()


async def exits() -> None:
    raise SystemExit(3)


def test_results_and_exceptions_come_back_to_the_caller() -> None:
    async def fails() -> None:
        raise KeyError("it")

    with LoopThread("t") as thread:
        assert thread.call(double(4)) == 8
        with pytest.raises(KeyError):
            thread.call(fails())
        assert thread.call(double(5)) == 10


def test_leaving_cancels_what_runs() -> None:
    ended = threading.Event()

    async def waits() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    with LoopThread("t") as thread:
        future = thread.start(waits())
        thread.call(double(1))
    assert ended.is_set() and future.cancelled()
    with pytest.raises(LoopEnded, match="'t' has ended"):
        thread.call(double(1))


def test_a_thread_that_dies_answers_all_that_wait_and_all_that_come() -> None:
    """A task that raises SystemExit takes the loop with it; asyncio tells nobody."""
    with LoopThread("t") as thread:
        waiting = thread.start(for_ever())
        told = threading.Event()
        waiting.add_done_callback(lambda future: told.set())
        with pytest.raises((LoopEnded, SystemExit)):
            thread.call(exits())
        with pytest.raises(LoopEnded, match="SystemExit: 3"):
            waiting.result(10)
        assert told.wait(10)
        with pytest.raises(LoopEnded):
            thread.call(double(1))
        thread.cancel_all()
