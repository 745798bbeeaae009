"""Several servers as one engine, each of ours behind SGLang's routes: ones that lie, stall, are
slow, are killed and are stopped. What every engine must do is in
tests/rollout/test_engines_alike.py."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.servers import http_engine
from distflow.rollout.servers.fleet import Fleet
from distflow.rollout.servers.http_engine import HttpEngine, ServerFailed, WeightFiles
from distflow.rollout.servers.sglang_engine import SGLangEngine
from distflow.runtime.weight_sync.protocol import check_receipt
from distflow.scheduling.group_states import Version
from tests.rollout.drive import (
    DEADLINE_S,
    FIRST,
    forward_log_probs,
    make_model,
    prompt_of,
    request_of,
)
from tests.rollout.servers.sglang_server import Running, SGLang
from tests.rollout.servers.test_sglang import launcher
from tests.tiny_models import tiny_tokenizer

Story = Callable[[Fleet, list[SGLang]], Awaitable[Any]]


def with_fleet(story: Story, num_servers: int = 3, **args: Any) -> None:
    """Of servers in this process; they have the first weights."""
    model = make_model()

    async def run(servers: list[Running]) -> None:
        engines = [
            SGLangEngine(model, tiny_tokenizer(), version=FIRST, url=each.url) for each in servers
        ]
        async with Fleet(engines) as fleet:
            await fleet.load_weights(Version(0, 1), list(model.named_parameters()))
            await asyncio.wait_for(story(fleet, [each.state for each in servers]), 2 * DEADLINE_S)

    with ExitStack() as entered:
        options = {"enable_deterministic_inference": True, **args}
        made = [
            Running(make_model(seed=5), tiny_tokenizer(), **options) for _ in range(num_servers)
        ]
        asyncio.run(run([entered.enter_context(each) for each in made]))


def groups(count: int, first: int = 0, **params: Any) -> list[GenerateRequest]:
    return [
        request_of(prompt_of(4 + row % 5, row), (0, 1, 2), row=row, **params)
        for row in range(first, first + count)
    ]


async def ask(fleet: Fleet, requests: list[GenerateRequest]) -> list[tuple[Segment, ...]]:
    return list(await asyncio.gather(*map(fleet.generate, requests)))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # the story has a deadline
        await asyncio.sleep(0.01)


def metric(fleet: Fleet, number: int, name: str) -> float:
    return fleet.server_metrics()[f"rollout_server/{number}/{name}"]


def changed(version: int) -> list[Any]:
    return list(make_model(seed=version).named_parameters())


def test_groups_stay_together_and_turns_come_back():
    async def story(fleet: Fleet, servers: list[SGLang]) -> None:
        requests = groups(9)
        await ask(fleet, requests)
        homes = [
            [
                number
                for number, each in enumerate(servers)
                for p in each.prompts
                if p == r.prompt_ids
            ]
            for r in requests
        ]
        assert all(len(each) == 3 and len({*each}) == 1 for each in homes), (
            "a group's samples share its prefix"
        )
        assert sorted(each[0] for each in homes) == [0, 0, 0, 1, 1, 1, 2, 2, 2], (
            "by outstanding tokens"
        )
        assert [metric(fleet, number, "outstanding_tokens") for number in range(3)] == [0, 0, 0]

        for request, (home, *_) in zip(requests, homes, strict=True):
            turn = replace(
                request, prompt_ids=(*request.prompt_ids, 7, 8), samples=(1,), num_drawn=12
            )
            await fleet.generate(turn)
            assert turn.prompt_ids in servers[home].prompts

    with_fleet(story)


def test_an_update_that_one_server_refuses_does_not_hold_the_others(monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)

    async def story(fleet: Fleet, servers: list[SGLang]) -> None:
        servers[1].lie = "refuses"
        weights = changed(2)
        receipt = await fleet.load_weights(Version(0, 2), weights)
        check_receipt(receipt, Version(0, 2), stripe_hashes(weights))
        assert fleet.version == Version(0, 2) and await fleet.hashes() == stripe_hashes(weights)
        before = len(servers[1].prompts)
        for result in await ask(fleet, requests := groups(6)):
            assert {version for each in result for version in each.versions} == {2}
        assert len(servers[1].prompts) == before, "it has older weights"
        servers[1].lie = ""
        await until(lambda: metric(fleet, 1, "restarts") > 0)
        again = await ask(fleet, groups(6, first=6))
        assert len(servers[1].prompts) > before
        assert all(list(each.versions) == [2] * 12 for result in again for each in result)
        (first, *_), model = (await ask(fleet, requests))[0], make_model(seed=2)
        truth = forward_log_probs(model, requests[0].prompt_ids, first)
        assert first.rollout_log_probs == pytest.approx(truth, abs=1e-4)

    with_fleet(story)


def test_a_server_that_is_slow_to_update_gets_requests_when_it_has_caught_up(monkeypatch):
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.05)

    async def story(fleet: Fleet, servers: list[SGLang]) -> None:
        servers[1].lie = "updates later"
        update = asyncio.create_task(fleet.load_weights(Version(0, 2), changed(2)))
        await until(lambda: servers[0].label == "0.2")
        monkeypatch.setattr(http_engine, "ATTACH_S", 0.0)
        await update
        monkeypatch.undo()
        before = len(servers[1].prompts)
        results = await ask(fleet, groups(6))
        assert len(servers[1].prompts) == before and metric(fleet, 1, "moved_requests") == 0
        servers[1].lie = ""
        await until(lambda: metric(fleet, 1, "restarts") > 0)
        results += await ask(fleet, groups(6, first=6))
        assert len(servers[1].prompts) > before
        assert all(list(each.versions) == [2] * 12 for result in results for each in result)

    with_fleet(story, num_servers=2)


def test_a_fleet_that_hangs_is_told_with_its_servers():
    """`engine_watch.py` asks for it."""
    urls = ("http://one", "http://two")
    fleet = Fleet(
        [
            SGLangEngine(make_model(), tiny_tokenizer(), version=FIRST, url=url)
            for url in (*urls, urls[0])
        ]
    )
    assert [fleet.who.count(url) for url in urls] == [1, 1]


def test_a_fleet_has_a_version_only_when_its_servers_have_it(monkeypatch):
    seen = list[Version]()
    load_files = HttpEngine.load

    async def story(fleet: Fleet, servers: list[SGLang]) -> None:
        async def load(engine: HttpEngine, files: WeightFiles) -> None:
            seen.append(fleet.version)
            await load_files(engine, files)

        monkeypatch.setattr(HttpEngine, "load", load)
        await fleet.load_weights(Version(0, 2), changed(2))
        assert seen == [Version(0, 1)] * 2 and fleet.version == Version(0, 2)

    with_fleet(story, num_servers=2)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["keeps its label", "error"])
def test_a_server_that_fails_in_an_update_is_named_only_where_no_other_is_left(lie, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(http_engine, "ATTACH_S", 0.1)

    async def story(fleet: Fleet, servers: list[SGLang]) -> None:
        servers[0].lie = lie
        await fleet.load_weights(Version(0, 2), changed(2))
        assert all(
            list(each.versions) == [2] * 12 for r in await ask(fleet, groups(4)) for each in r
        )
        servers[1].lie = lie

        with pytest.raises(
            ServerFailed,
            match=r"no server of the fleet (.|\n)*server 0(.|\n)*server 1: ",
        ):
            await fleet.load_weights(Version(0, 3), changed(3))

        with pytest.raises(ServerFailed, match="no server of the fleet "):
            await ask(fleet, groups(1))

    with_fleet(story, num_servers=2)


def test_a_pause_holds_all_servers_and_one_that_comes_back_in_it(monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)

    async def story(fleet: Fleet, servers: list[SGLang]) -> None:
        servers[1].lie = "refuses"
        await fleet.load_weights(Version(0, 2), changed(2))
        await fleet.pause()
        tasks = [asyncio.create_task(fleet.generate(each)) for each in groups(4)]
        servers[1].lie = ""
        await until(lambda: metric(fleet, 1, "restarts") > 0)
        await fleet.load_weights(Version(0, 3), changed(3))
        assert all(each.paused for each in servers) and not any(each.done() for each in tasks)
        await fleet.resume()
        results = await asyncio.gather(*tasks)
        assert all(list(each.versions) == [3] * 12 for result in results for each in result)

    with_fleet(story, num_servers=2)


def test_a_fleet_with_an_address_where_nobody_is_does_not_start(monkeypatch):
    monkeypatch.setattr(http_engine, "ATTACH_S", 0.1)

    async def run(url: str) -> None:
        urls = (url, "http://127.0.0.1:1")
        async with Fleet(
            [SGLangEngine(make_model(), tiny_tokenizer(), version=FIRST, url=each) for each in urls]
        ):
            raise AssertionError("entered")

    with (
        Running(make_model(), tiny_tokenizer()) as server,
        pytest.raises(UserError, match=r"http://127\.0\.0\.1:1: "),
    ):
        asyncio.run(run(server.url))


@pytest.mark.parametrize("ends", ["a cancelled start", "an exit at which one raises"])
def test_all_engines_are_freed_by(ends, monkeypatch):
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.01)
    happened = asyncio.Event()

    class First(SGLangEngine):
        async def __aenter__(self) -> HttpEngine:
            await super().__aenter__()
            if ends == "a cancelled start":
                happened.set()
            return self

        async def count_tokens(self) -> int:
            happened.set()
            raise NotImplementedError

    async def run(server: Running) -> None:
        other = server.url if ends == "an exit at which one raises" else "http://127.0.0.1:1"
        kinds = {First: server.url, SGLangEngine: other}
        engines = [
            kind(make_model(), tiny_tokenizer(), version=FIRST, url=url)
            for kind, url in kinds.items()
        ]

        async def use() -> None:
            async with Fleet(engines) as fleet:
                server.state.lie = "never answers"
                task = asyncio.create_task(fleet.generate(*groups(1)))
                await happened.wait()
                task.cancel()

        task = asyncio.create_task(use())
        await asyncio.wait_for(happened.wait(), DEADLINE_S)
        if ends == "a cancelled start":
            task.cancel()

        with pytest.raises(
            asyncio.CancelledError if ends == "a cancelled start" else NotImplementedError
        ):
            await task

        assert all(each.client.is_closed and not each.folder.path.exists() for each in engines)

    with Running(make_model(), tiny_tokenizer()) as server:
        asyncio.run(run(server))


def test_a_look_at_a_server_ends_when_it_is_cancelled_as_the_answer_comes():
    """Otherwise it would go on forever, and the end of the fleet would wait for it."""

    class Shared(SGLangEngine):
        is_shared = True

        async def count_tokens(self) -> int:
            await answer.wait()
            return 0

    async def run(url: str) -> None:
        async with Shared(make_model(), tiny_tokenizer(), version=FIRST, url=url) as engine:
            look = asyncio.create_task(engine.is_hanging())
            await asyncio.sleep(0.05)
            answer.set()
            look.cancel()
            with pytest.raises(asyncio.CancelledError):
                await look

    answer = asyncio.Event()
    with Running(make_model(), tiny_tokenizer()) as server:
        asyncio.run(run(server.url))


@pytest.mark.slow
@pytest.mark.alone
def test_three_servers_of_which_one_is_killed_and_one_is_stopped_are_bit_equal_to_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(http_engine, "SILENT_S", 4.0)
    model = make_model()
    options = {"enable_deterministic_inference": True, "batch_invariant": True}
    make = {"version": FIRST, "python": launcher(tmp_path), "engine_kwargs": options}
    engines = [SGLangEngine(model, tiny_tokenizer(), **make) for _ in range(3)]
    requests, more = groups(12, max_tokens=100), groups(12, first=12, max_tokens=100)

    async def story(fleet: Fleet) -> None:
        await fleet.load_weights(Version(0, 1), list(model.named_parameters()))
        alone = [await engines[0].generate(each) for each in (*requests, *more)]
        tasks = [asyncio.create_task(fleet.generate(each)) for each in requests]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

        for engine, kind in ((engines[1], signal.SIGKILL), (engines[2], signal.SIGSTOP)):
            assert engine._process is not None
            os.killpg(engine._process.pid, kind)

        tasks += [asyncio.create_task(fleet.generate(each)) for each in more]
        assert list(await asyncio.gather(*tasks)) == alone
        assert min(metric(fleet, 1, "moved_requests"), metric(fleet, 2, "moved_requests")) >= 1
        await until(lambda: metric(fleet, 1, "restarts") == metric(fleet, 2, "restarts") == 1)
        assert await ask(fleet, [*requests, *more]) == alone
        await fleet.load_weights(Version(0, 2), weights := changed(2))
        assert [await each.hashes() for each in engines] == [stripe_hashes(weights)] * 3

    async def run() -> None:
        async with Fleet(engines) as fleet:
            await asyncio.wait_for(story(fleet), 10 * DEADLINE_S)

    asyncio.run(run())
