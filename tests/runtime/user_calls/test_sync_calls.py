"""Plain functions called from the asyncio thread: deadlines that hold, and no place lost to a hang."""

import asyncio
import contextvars
import threading

import pytest

from distflow.runtime.user_calls.sync_calls import DeadlinePassed, PlainCalls
from tests.patience import at_some_deadline


def test_results_errors_and_the_caller_s_context() -> None:
    name = contextvars.ContextVar("name", default="none")

    def fails() -> None:
        raise KeyError("it")

    def stops() -> None:
        raise StopIteration

    def exits() -> None:
        raise SystemExit(3)

    async def run() -> None:
        calls = PlainCalls()
        name.set("ours")
        assert await calls.run(name.get, 10) == "ours"
        for function, error in ((fails, KeyError), (stops, RuntimeError), (exits, RuntimeError)):
            with pytest.raises(error):
                await calls.run(function, 10)

    asyncio.run(run())


def test_hangs_keep_no_place_and_no_one_waits_for_their_threads() -> None:
    release = threading.Event()

    async def run() -> list[str]:
        calls = PlainCalls()
        hangs = [calls.run(release.wait, 0.05) for _ in range(6)]
        ended = await asyncio.gather(*hangs, return_exceptions=True)
        assert all(isinstance(error, DeadlinePassed) for error in ended)
        return [await calls.run(lambda: "served", 10), await calls.run(threading.current_thread, 10)]

    served, thread = asyncio.run(run())
    release.set()
    assert served == "served" and thread.daemon


def test_the_deadline_runs_from_the_start_of_the_call() -> None:
    """Calls that queue after others must not time out for that."""
    pause = threading.Event()

    async def run(deadline_s: float) -> list[bool | BaseException]:
        calls, each_s = PlainCalls(), deadline_s / 50
        queued = (calls.run(lambda: pause.wait(each_s), deadline_s) for _ in range(60))
        return await asyncio.gather(*queued, return_exceptions=True)

    def check(deadline_s: float) -> None:
        assert asyncio.run(run(deadline_s)) == [False] * 60

    at_some_deadline(check, 1.0, 10.0)
