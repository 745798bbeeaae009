"""Requests that are answered later: carried out once, in order, and kept until they are fetched."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from distflow.tinker import futures
from distflow.tinker.futures import Conflict, Futures, Gone, Result, TooMany, Turns
from distflow.tinker.messages import BadRequest, WorkerLost

SOON_S = 0.01
LONG_S = 30.0


def answering(value: str, done: list[str] | None = None) -> Callable[[], Awaitable[Result]]:
    async def work() -> Result:
        if done is not None:
            done.append(value)
        return value.encode()

    return work


def failing(error: Exception) -> Callable[[], Awaitable[Result]]:
    async def work() -> Result:
        raise error

    return work


def waiting_for(event: asyncio.Event) -> Callable[[], Awaitable[Result]]:
    async def work() -> Result:
        await event.wait()
        return b"late"

    return work


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_request_that_comes_twice_is_carried_out_once() -> None:
    async def run() -> None:
        known = Futures(print)
        done: list[str] = []
        known.submit("a", 1, answering("first", done))
        known.submit("a", 1, answering("second", done))
        assert await known.result("a", LONG_S) == b"first"
        known.submit("a", 1, answering("third", done))
        assert await known.result("a", LONG_S) == b"first"
        assert done == ["first"]

    asyncio.run(run())


def test_another_request_under_its_number_is_a_conflict() -> None:
    async def run() -> None:
        known = Futures(print)
        known.submit("a", 1, answering("first"))
        with pytest.raises(Conflict, match="a was another request"):
            known.submit("a", 2, answering("second"))
        assert await known.result("a", LONG_S) == b"first"

    asyncio.run(run())


def test_a_result_is_there_in_time_or_is_asked_for_again() -> None:
    async def run() -> None:
        known = Futures(print)
        event = asyncio.Event()
        known.submit("a", 1, waiting_for(event))
        assert await known.result("a", SOON_S) is None
        asks = [asyncio.ensure_future(known.result("a", LONG_S)) for _ in range(3)]
        await settle()
        event.set()
        assert await asyncio.gather(*asks) == [b"late"] * 3

    asyncio.run(run())


def test_an_error_is_kept_like_a_result() -> None:
    async def run() -> None:
        known = Futures(print)
        known.submit("a", 1, failing(BadRequest("datum 3")))
        for _ in range(2):
            with pytest.raises(BadRequest, match="datum 3"):
                await known.result("a", LONG_S)
        with pytest.raises(Gone, match="'b'"):
            await known.result("b", LONG_S)

    asyncio.run(run())


def test_a_cancelled_request_is_forgotten_and_no_other() -> None:
    """Also one whose number begins alike."""

    async def run() -> None:
        known = Futures(print)
        event = asyncio.Event()
        for name in ("m:1", "m:10", "m:11", "n:1"):
            known.submit(name, 1, waiting_for(event))
        ask = asyncio.ensure_future(known.result("m:1", LONG_S))
        await settle()
        known.cancel("m:1")
        known.cancel("unknown")
        with pytest.raises(BadRequest, match="cancelled"):
            await ask
        with pytest.raises(Gone):
            await known.result("m:1", LONG_S)

        event.set()
        assert await known.result("m:10", LONG_S) == b"late"
        known.cancel_session("m")
        for name in ("m:10", "m:11"):
            with pytest.raises(Gone):
                await known.result(name, LONG_S)
        assert await known.result("n:1", LONG_S) == b"late"

    asyncio.run(run())


def test_only_the_last_results_that_were_fetched_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others, and of what is not fetched, none is forgotten."""
    monkeypatch.setattr(futures, "_MAX_FETCHED", 2)

    async def run() -> None:
        known = Futures(print)
        for name in ("s:a", "s:b", "s:c", "s:unfetched", "other:a"):
            known.submit(name, 1, answering(name))
        for name in ("other:a", "s:a", "s:b", "s:a", "s:c"):
            assert await known.result(name, LONG_S) == name.encode()
        with pytest.raises(Gone):
            await known.result("s:b", LONG_S)
        for name in ("s:a", "s:c", "s:unfetched", "other:a"):
            assert await known.result(name, LONG_S) == name.encode()

    asyncio.run(run())


def test_too_many_that_nobody_fetches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many were fetched."""
    monkeypatch.setattr(futures, "_MAX_WAITING", 3)

    async def run() -> None:
        known = Futures(print)
        for number in range(9):
            known.submit(f"s:{number}", 1, answering("fetched"))
            assert await known.result(f"s:{number}", LONG_S) == b"fetched"

        for name in ("s:a", "s:b", "s:c"):
            known.submit(name, 1, answering(name))
        with pytest.raises(TooMany, match="3 results"):
            known.submit("s:d", 1, answering("s:d"))
        known.submit("s:a", 1, answering("s:a"))
        assert await known.result("s:b", LONG_S) == b"s:b"
        known.submit("s:d", 1, answering("s:d"))
        assert await known.result("s:d", LONG_S) == b"s:d"

    asyncio.run(run())


def test_a_model_is_saved_with_the_results_that_may_be_asked_for() -> None:
    """Those that are there: of no error, and of no other model."""

    async def run() -> None:
        known = Futures(print)
        known.restore("s:train:0:1", b"restored")
        known.submit("s:train:0:2", 1, answering("done"))
        known.submit("s:train:0:3", 1, failing(BadRequest("datum 3")))
        known.submit("s:train:0:4", 1, waiting_for(asyncio.Event()))
        known.submit("s:train:01:5", 1, answering("other"))
        await known.result("s:train:0:1", LONG_S)
        await settle()
        known.submit("s:train:0:1", 1, failing(BadRequest("it is known")))
        known.restore("s:train:0:2", b"it is known")
        assert dict(known.results("s:train:0")) == {1: b"restored", 2: b"done"}
        known.cancel_all()

    asyncio.run(run())


def test_what_one_session_leaves_behind_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "_MAX_WAITING", 2)

    async def run() -> None:
        known = Futures(print)
        for name in ("one:train:0:1", "one:sample:0:1"):
            known.submit(name, 1, answering(name))
        with pytest.raises(TooMany, match="2 results"):
            known.submit("one:train:1:1", 1, answering("more"))
        known.submit("two:train:0:1", 1, answering("other"))
        assert await known.result("two:train:0:1", LONG_S) == b"other"

        known.cancel_session("one")
        known.submit("one:train:1:1", 1, answering("more"))
        assert await known.result("one:train:1:1", LONG_S) == b"more"

    asyncio.run(run())


def test_a_number_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after it keep their order; nothing is given up while the next is at work."""
    monkeypatch.setattr(futures, "_MISSING_S", 0.05)

    async def run() -> None:
        turns = Turns()
        done: list[str] = []
        event = asyncio.Event()
        running = asyncio.ensure_future(turns.take(1, waiting_for(event)))
        later = [
            asyncio.ensure_future(turns.take(number, answering(str(number), done)))
            for number in (5, 4)
        ]
        await asyncio.sleep(0.2)
        assert done == []

        event.set()
        assert await running == b"late"
        await asyncio.wait_for(asyncio.gather(*later), LONG_S)
        assert done == ["4", "5"]
        with pytest.raises(BadRequest, match="seq_id 3 was used: the next is 6"):
            await turns.take(3, answering("third", done))
        await turns.take(6, answering("6", done))
        assert done == ["4", "5", "6"]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_carried_out_in_order_whatever_order_they_come(seed: int) -> None:
    """Some fail, and the next has its turn."""
    draw = random.Random(seed)
    numbers = list(range(1, 16))
    draw.shuffle(numbers)
    failures = set(draw.sample(numbers, 4))

    async def run() -> None:
        turns = Turns()
        began: list[int] = []
        num_running = 0

        async def work(number: int) -> Result:
            nonlocal num_running
            assert num_running == 0
            num_running += 1
            began.append(number)
            await asyncio.sleep(0)
            num_running -= 1
            if number in failures:
                raise BadRequest(f"request {number}")
            return b"%d" % number

        tasks = []
        for number in numbers:
            take = turns.take(number, partial(work, number))
            tasks.append(asyncio.ensure_future(take))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert began == list(range(1, 16))
        for number, result in zip(numbers, results, strict=True):
            if number in failures:
                assert isinstance(result, BadRequest) and str(result) == f"request {number}"
            else:
                assert result == b"%d" % number

    asyncio.run(run())


def test_a_used_number_is_refused() -> None:
    """Over, running or waiting."""

    async def run() -> None:
        turns = Turns()
        event = asyncio.Event()
        await turns.take(1, answering("first"))
        running = asyncio.ensure_future(turns.take(2, waiting_for(event)))
        waiting = asyncio.ensure_future(turns.take(4, answering("fourth")))
        await settle()
        done: list[str] = []
        for number in (1, 2, 4):
            with pytest.raises(BadRequest, match=f"seq_id {number} was used: the next is 2"):
                await turns.take(number, answering("again", done))

        event.set()
        assert await running == b"late"
        assert await turns.take(3, answering("third")) == b"third"
        assert await waiting == b"fourth"
        assert done == []

    asyncio.run(run())


def test_the_turn_of_a_cancelled_number_is_skipped() -> None:
    async def run() -> None:
        turns = Turns()
        event = asyncio.Event()
        done: list[str] = []
        running = asyncio.ensure_future(turns.take(1, waiting_for(event)))
        waiting = [
            asyncio.ensure_future(turns.take(number, answering(str(number), done)))
            for number in (2, 3, 4)
        ]
        await settle()
        waiting[0].cancel()
        waiting[1].cancel()
        await settle()
        with pytest.raises(BadRequest, match="seq_id 3 was used"):
            await turns.take(3, answering("again", done))
        assert done == []

        running.cancel()
        assert await asyncio.wait_for(waiting[2], LONG_S) == b"4"
        assert await turns.take(5, answering("5", done)) == b"5"
        assert done == ["4", "5"]

    asyncio.run(run())


def test_the_loss_of_a_worker_is_told() -> None:
    """Also of a request whose result nobody fetches; no other error is."""

    async def run() -> None:
        told: list[str] = []
        known = Futures(lambda error: told.append(str(error)))
        known.submit("s:1", 1, failing(BadRequest("datum 3")))
        known.submit("s:2", 1, failing(WorkerLost("worker 2 has died")))
        await settle()
        assert told == ["worker 2 has died"]

    asyncio.run(run())
