"""A server that is killed at any moment and started again on its folder goes on where it was: its
clients notice nothing."""

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from distflow.observe.run_reader import read_metrics
from tests.tinker.server import LastingServer

tinker = pytest.importorskip("tinker")
pytestmark = pytest.mark.slow

IDS = [5, 9, 7, 8, 6, 10, 11]
NUM_STEPS = 24


def datum(ids: list[int]) -> Any:
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def train(client: Any, model_name: str, pause_s: float, losses: list[float]) -> Any:
    """Two passes for each step, sent before the first is answered; saved and sampled at times."""
    model = client.create_lora_training_client(base_model=model_name, rank=4, seed=3).result()
    draw = random.Random(5)
    for step in range(NUM_STEPS):
        passes = []
        for _ in range(2):
            ids = [draw.randrange(5, 20) for _ in range(9)]
            passes.append(model.forward_backward([datum(ids)], "cross_entropy"))
        stepped = model.optim_step(tinker.types.AdamParams(learning_rate=1e-2))
        losses += [each.result().metrics["loss:sum"] for each in passes]
        losses.append(stepped.result().metrics["grad_norm"])

        if step % 8 == 3:
            model.save_state(f"step-{step}").result()
            sampler = model.save_weights_and_get_sampling_client().result()
            params = tinker.types.SamplingParams(max_tokens=4, seed=1)
            prompt = tinker.types.ModelInput.from_ints(IDS)
            drawn = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
            losses += list(drawn.sequences[0].logprobs)
        time.sleep(pause_s)
    return model


def test_a_loop_goes_on_over_kills_of_the_server(tmp_path: Path) -> None:
    """Bit-equal, with every step once in the model's run."""
    server = LastingServer(tmp_path)
    name = str(tmp_path / "model")
    try:
        client = tinker.ServiceClient(**server.address)
        expected: list[float] = []
        train(client, name, 0.0, expected)

        found: list[float] = []
        trained: list[Any] = []
        loop = threading.Thread(
            target=lambda: trained.append(train(client, name, 0.2, found)), daemon=True
        )
        loop.start()
        draw = random.Random(1)
        for _ in range(2):
            seen = len(found)
            while len(found) < seen + 6:
                time.sleep(0.05)
            time.sleep(draw.uniform(1.2, 1.6))
            server.end(signal.SIGKILL)
            server.start()
        loop.join(540)
        assert not loop.is_alive()
        assert found == expected
        client.close("success")
    finally:
        server.end(signal.SIGINT)

    run = server.checkpoints / trained[0].model_id
    assert [each.step for each in read_metrics(run)] == list(range(1, NUM_STEPS + 1))


def test_a_session_that_ended_is_not_taken_up(tmp_path: Path) -> None:
    server = LastingServer(tmp_path)
    try:
        client = tinker.ServiceClient(**server.address)
        client.create_lora_training_client(base_model=str(tmp_path / "model"), rank=4).result()
        client.close("success")
        deadline = time.monotonic() + 30
        while [*(server.checkpoints / "sessions").glob("session-*")]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        server.end(signal.SIGINT)


def test_a_client_that_never_trains_fills_no_disk(tmp_path: Path) -> None:
    """Its requests leave the disk although no step was done, and it goes on after a kill."""
    server = LastingServer(tmp_path)
    try:
        client = tinker.ServiceClient(**server.address)
        name = str(tmp_path / "model")
        model = client.create_lora_training_client(base_model=name, rank=4).result()
        (requests,) = (server.checkpoints / "sessions").glob("*/0/requests")
        sizes = []
        losses = set()
        deadline = time.monotonic() + 120
        while len(sizes) < 2 or sizes[-1] > sizes[-2]:
            passed = model.forward([datum(IDS)], "cross_entropy").result()
            losses.add(passed.metrics["loss:sum"])
            sizes.append(requests.stat().st_size)
            assert time.monotonic() < deadline

        server.end(signal.SIGKILL)
        server.start()
        passed = model.forward([datum(IDS)], "cross_entropy").result()
        losses.add(passed.metrics["loss:sum"])
        assert len(losses) == 1
        client.close("success")
    finally:
        server.end(signal.SIGINT)
