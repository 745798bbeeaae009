"""Models of a server that ended without a word go on as if it had not."""

import asyncio
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distflow.models.loading import load_model
from distflow.tinker import journal as journal_module
from distflow.tinker.adapter import SharedBase, TrainedAdapter
from distflow.tinker.model_memory import ModelMemory
from distflow.tinker.service import BaseModel, Service
from tests.tiny_models import write_tiny_model

pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
pytest.importorskip("peft")

IDS = (5, 9, 7, 8, 6, 10, 11)


class NoSamplers:
    async def close(self) -> None:
        pass


def make_service(model: Path, folder: Path) -> Service:
    shared = SharedBase(load_model(model), None, ModelMemory(math.inf, folder))
    make_adapter = partial(TrainedAdapter, shared)
    base = BaseModel(
        "tiny", str(model), "qwen3", 64, (), make_adapter, lambda computing: NoSamplers(), str
    )
    return Service(base, folder, print)


async def result_of(service: Service, request_id: str) -> bytes:
    found = None
    while found is None:
        found = await service.futures.result(request_id, 60)
    return found


async def done(service: Service, kind: str, content: bytes) -> bytes:
    asked = await service.accept(kind, content)
    return await result_of(service, asked["request_id"])


def one_pass(model_id: str, number: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cross_entropy")
    data = message.data.add()
    data.model_input.add().encoded_text.tokens = np.array(IDS[:-1], np.int32).tobytes()
    targets = data.loss_fn_inputs["target_tokens"]
    targets.dtype = pb.DTYPE_INT64
    targets.dense = np.array(IDS[1:], np.int64).tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


def one_step(model_id: str, number: int) -> bytes:
    step = {"model_id": model_id, "seq_id": number, "adam_params": {"learning_rate": 0.01}}
    return json.dumps(step).encode()


async def trained(service: Service, model_id: str, numbers: range) -> list[bytes]:
    """The results of passes, which have odd numbers, and of steps."""
    found = []
    for number in numbers:
        if number % 2:
            found.append(await done(service, "forward_backward", one_pass(model_id, number)))
        else:
            found.append(await done(service, "optim_step", one_step(model_id, number)))
    return found


@pytest.mark.parametrize("saved_after", [0, 2, 4])
def test_a_killed_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_after: int
) -> None:
    """From a state that was saved after some steps, or none, and the requests since."""
    model = write_tiny_model(tmp_path / "model", "qwen3")
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(journal_module, "_SHARE", 0.0)

    async def create(service: Service, session: str, number: int) -> str:
        lora = {"rank": 4, "seed": 3}
        given: dict[str, Any] = {"session_id": session, "model_seq_id": number}
        content = json.dumps({**given, "base_model": "tiny", "lora_config": lora}).encode()
        made = json.loads(await done(service, "create_model", content))
        return str(made["model_id"])

    async def run() -> None:
        killed = make_service(model, folder)
        session = killed.create_session()
        monkeypatch.setattr(journal_module, "_EVERY_S", math.inf)
        expected = await trained(killed, await create(killed, session, 0), range(1, 9))

        model_id = await create(killed, session, 1)
        monkeypatch.setattr(journal_module, "_EVERY_S", 0.0)
        found = await trained(killed, model_id, range(1, saved_after + 1))
        monkeypatch.setattr(journal_module, "_EVERY_S", math.inf)
        found += await trained(killed, model_id, range(saved_after + 1, 6))

        again = make_service(model, folder)
        await again.restore()
        for number in range(1, 6):
            assert await result_of(again, f"{model_id}:{number}") == expected[number - 1]
        found += await trained(again, model_id, range(6, 9))
        assert [again.models_of(session)] == [[f"{session}:train:0", model_id]]
        for own, wanted in zip(found, expected, strict=True):
            assert own == wanted
        await again.close()
        await killed.close()

    asyncio.run(run())
