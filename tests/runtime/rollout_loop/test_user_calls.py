"""Calls of a user's functions: deadlines that hold, random generators of their own, and no place
lost to a hang."""

import asyncio
import contextvars
import gc
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from distflow.data import global_random_states
from distflow.runtime.rollout_loop.user_calls import (
    DeadlinePassed,
    PlainCalls,
    deadline_paused,
    run_async,
)
from tests.patience import at_some_deadline

Work = Callable[[], Awaitable[Any]]


async def call(function: Work, deadline_s: float = 10.0) -> Any:
    return await run_async(function, deadline_s, asyncio.Lock(), "a call")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


async def waits_for_ever() -> None:
    await asyncio.Event().wait()


async def spins() -> None:
    while True:
        await asyncio.sleep(0)


async def its_task_never_ends() -> None:
    await asyncio.gather(asyncio.sleep(0), waits_for_ever())


async def fails_at_the_end() -> None:
    try:
        await waits_for_ever()
    finally:
        raise KeyError


@pytest.mark.parametrize("function", [waits_for_ever, spins, its_task_never_ends, fails_at_the_end])
def test_one_that_never_returns_is_cancelled_at_its_deadline(function, caplog):
    with pytest.raises(DeadlinePassed) as passed:
        asyncio.run(call(function, 0.05))
    gc.collect()
    assert str(passed.value) == "" and not caplog.records, "asyncio complains of no lost error"


def test_tasks_that_it_started_end_with_it_at_its_deadline():
    started = list[asyncio.Task[None]]()

    async def waits_beside_a_task() -> None:
        started.append(asyncio.create_task(waits_for_ever()))
        await waits_for_ever()

    async def run() -> bool:
        with pytest.raises(DeadlinePassed):
            await call(waits_beside_a_task, 0.5)  # long enough that it has begun
        return started[0].cancelled()

    assert asyncio.run(run())


def test_one_that_swallows_its_cancellation_is_left_behind():
    ends = False

    async def stays() -> None:
        while not ends:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def run() -> None:
        nonlocal ends
        with pytest.raises(DeadlinePassed, match="cancel"):
            await call(stays, 0.5)  # long enough that it has begun
        ends = True

    asyncio.run(run())


def test_what_it_waits_for_of_ours_does_not_count():
    async def asks() -> str:
        for _ in range(3):
            with deadline_paused():
                await asyncio.sleep(0.1)
        return "answered"

    assert asyncio.run(call(asks, 0.1)) == "answered"


def test_results_and_errors_come_back():
    async def fails(error: BaseException) -> None:
        raise error

    async def run() -> None:
        assert await call(lambda: asyncio.sleep(0, "done")) == "done"
        for error in (KeyError("it"), TimeoutError("its own"), SystemExit(3)):
            with pytest.raises(type(error)):
                await call(lambda error=error: fails(error))  # type: ignore[misc]

        with pytest.raises(RuntimeError, match="asked to exit"):
            await call(lambda: asyncio.gather(fails(SystemExit(3))))  # type: ignore[arg-type]
        assert await call(lambda: asyncio.wait_for(asyncio.sleep(0, "in time"), 10)) == "in time"

    asyncio.run(run())


def test_each_call_draws_its_own_whatever_runs_beside_it_and_leaves_no_trace():
    async def draws_between_waits(seconds: float) -> list[Any]:
        drawn = [draw()]
        for _ in range(3):
            await asyncio.sleep(seconds)
            drawn.append(draw())
        return [*drawn, await asyncio.gather(*(child() for _ in range(2)))]

    async def child() -> Any:
        await asyncio.sleep(0)
        return draw()

    def plainly() -> list[Any]:
        drawn = [draw()]
        torch.manual_seed(0)
        time.sleep(0.01)
        return [*drawn, draw()]

    async def run(at_once: bool) -> list[Any]:
        calls = PlainCalls()
        work: list[Awaitable[Any]] = []
        for i in range(4):
            work.append(
                run_async(
                    lambda i=i: draws_between_waits(0.001 * (4 - i)), 10, calls.turn, "async", i
                )
            )  # type: ignore[misc]
            work.append(calls.run(plainly, 10, "plain", i))

        return list(await asyncio.gather(*work)) if at_once else [await one for one in work]

    global_random_states.seed("before")
    expected = draw(), draw()
    global_random_states.seed("before")
    first = draw()
    beside = asyncio.run(run(True))
    alone = asyncio.run(run(False))
    assert (first, draw()) == expected, "what is drawn outside does not know of them"
    assert beside == alone
    assert len({repr(drawn) for drawn in beside}) == 8, "each has numbers of its own"


def test_results_errors_and_the_caller_s_context():
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


def test_hangs_keep_no_place_and_no_one_waits_for_their_threads():
    release = threading.Event()

    async def run() -> list[str]:
        calls = PlainCalls()
        hangs = [calls.run(release.wait, 0.05) for _ in range(6)]
        ended = await asyncio.gather(*hangs, return_exceptions=True)
        assert all(isinstance(error, DeadlinePassed) for error in ended)

        return [
            await calls.run(lambda: "served", 10),
            await calls.run(threading.current_thread, 10),
        ]

    served, thread = asyncio.run(run())
    release.set()
    assert served == "served" and thread.daemon


def test_the_deadline_runs_from_the_start_of_the_call():
    """Calls that queue after others must not time out for that."""
    pause = threading.Event()

    async def run(deadline_s: float) -> list[bool | BaseException]:
        calls = PlainCalls()
        each_s = deadline_s / 50
        queued = (calls.run(lambda: pause.wait(each_s), deadline_s) for _ in range(60))
        return await asyncio.gather(*queued, return_exceptions=True)

    def check(deadline_s: float) -> None:
        assert asyncio.run(run(deadline_s)) == [False] * 60

    at_some_deadline(check, 1.0, 10.0)


def exits() -> None:
    raise SystemExit(7)


def fails() -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("end", "status"),
    [(exits, 7), (fails, 1), (lambda: None, 1)],
    ids=["exits", "fails", "goes on"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_users_does_not_go_on_as_a_second_run(end, status):
    async def forks() -> int:
        if (pid := os.fork()) == 0:
            end()
            await asyncio.sleep(0)
            return -1
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert asyncio.run(call(forks)) == status
