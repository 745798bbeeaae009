"""The asyncio thread: every call gets a result, also if it dies."""

import asyncio
import threading
from contextlib import suppress

import pytest

from distflow.runtime.rollout_loop import loop_thread
from distflow.runtime.rollout_loop.loop_thread import LoopBlocked, LoopEnded, LoopThread


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def for_ever() -> None:
    await asyncio.Event().wait()


async def exits() -> None:
    raise SystemExit(3)


def test_results_and_exceptions_come_back_to_the_caller():
    async def fails() -> None:
        raise KeyError("it")

    with LoopThread("t") as thread:
        assert thread.call(double(4)) == 8
        with pytest.raises(KeyError):
            thread.call(fails())
        assert thread.call(double(5)) == 10


def test_leaving_cancels_what_runs():
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


def test_a_thread_that_dies_fails_all_that_wait_and_all_that_come():
    """A task that raises SystemExit takes the loop with it; asyncio tells nobody."""
    with LoopThread("t") as thread:
        waiting = thread.start(for_ever())
        told = threading.Event()
        waiting.add_done_callback(lambda future: told.set())
        with pytest.raises((LoopEnded, SystemExit)):
            thread.call(exits())
        with pytest.raises(LoopEnded, match="SystemExit: 3"):
            waiting.result(60)
        assert told.wait(60)
        with pytest.raises(LoopEnded):
            thread.call(double(1))
        thread.cancel_all()


def test_nobody_waits_for_what_swallows_its_cancellation(monkeypatch):
    monkeypatch.setattr(loop_thread, "LEAVES_WITHIN_S", 0.05)
    stays = True

    async def swallows() -> None:
        while stays:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    with LoopThread("t") as thread:
        thread.start(swallows())
        thread.call(double(1))

    assert not thread._thread.is_alive()
    stays = False


def test_code_of_the_user_that_holds_the_thread_up_ends_what_waits_for_it():
    release = threading.Event()

    async def holds_up() -> None:
        release.wait(60)

    with LoopThread("t", blocked_after_s=0.3) as thread:
        waiting = thread.start(for_ever())
        said = r"blocked everything else for 0.3 s \(at test_loop_thread.py:\d+\): it must await"
        with pytest.raises(LoopBlocked, match=said):
            thread.call(holds_up())
        with pytest.raises(LoopBlocked):
            waiting.result(10)

    release.set()
