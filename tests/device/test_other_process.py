"""Weights of a device go in buckets to an engine on the device of another process: by files, and
through a process group."""

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.cluster.collective_weight_transport import Pairs
from distflow.models.loading import load_model
from distflow.rollout.engine import WeightReceipt
from distflow.rollout.engine_weights import EngineWeights, stripe_hashes
from distflow.runtime.weight_sync.bucket_files import Carry, hash_of, pack, write_bucket
from distflow.runtime.weight_sync.protocol import check_receipt
from distflow.runtime.weight_sync.receiver import IncomingWeights
from distflow.runtime.weight_sync.sender import buckets
from distflow.scheduling.group_states import Version
from tests.device.rehearsal import load_device, on_device
from tests.forks import forks
from tests.rollout.drive import make_engine, prompt_of, request_of, run_all, tokens_of
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.alone]
WORKER = 1
DEADLINE_S = 100


def answers(model: Any) -> list[list[int]]:
    return tokens_of(
        run_all(make_engine(model), [request_of(prompt_of(5), (0, 1, 2), max_tokens=20)])
    )


def hold(folder: Path, trainer: Connection) -> None:
    """A worker that does not train: it answers each call, and responses of its engine to an empty
    one."""
    load_device()
    model = load_model(folder, device="rehearsal", init="random", seed=5)
    incoming = IncomingWeights()
    held = EngineWeights(model, shared=False)

    def receive(version: Version, weights: Any) -> WeightReceipt:
        return held.load(Version(0, 0), version, weights)

    incoming.attach(receive)
    while call := trainer.recv():
        trainer.send(incoming.receive(*call) if len(call) == 4 else incoming.load(*call))
    trainer.send(answers(model))


def send(
    model: torch.nn.Module, version: Version, carry: Carry, worker: Connection, device: str = "cpu"
) -> None:
    """In buckets that are smaller than the model. device: from which `carry` sends."""
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    number = 0
    for number, bucket in enumerate(
        buckets(weights, sum(each.nbytes for _, each in weights) // 3), start=1
    ):
        packed = pack(bucket, device)
        sent = carry(version, number - 1, packed, (WORKER,))[WORKER]
        worker.send((version, number - 1, sent, hash_of(packed)))
        assert worker.poll(DEADLINE_S)
        assert (why := worker.recv()) is None, why
        sent.drop()

    assert number > 2
    worker.send((version, number))
    assert worker.poll(DEADLINE_S)
    check_receipt(worker.recv(), version, stripe_hashes(weights))


@on_device
def test_an_engine_on_the_device_of_another_process_gets_them_bit_for_bit(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    model = load_model(folder, device="rehearsal")
    worker, theirs = forks.Pipe()
    process = forks.Process(target=hold, args=(folder, theirs))
    process.start()

    try:
        send(model, Version(0, 1), partial(write_bucket, tmp_path), worker)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)

        from torch_rehearsal import Events

        with Events() as events:
            send(
                model,
                Version(0, 2),
                Pairs(tmp_path, "rehearsal", DEADLINE_S),
                worker,
                "rehearsal",
            )

        (read,) = (place for place in events.of("wait") if "bucket_files" in place[2])
        assert (
            events.counts[read] == len(list(model.parameters()))
            and events.bytes[read] == 8 * events.counts[read]
        ), "checksums alone"
        assert (
            sum(events.of("collective", "collective_weight_transport").values())
            == events.counts[read]
        )
        worker.send(())
        assert worker.poll(DEADLINE_S) and worker.recv() == answers(model)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    finally:
        process.kill()
