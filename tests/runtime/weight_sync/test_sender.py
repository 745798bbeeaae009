"""Weights on their way to an engine: in buckets, in its dtype, compared where the canary's turn has
come."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.errors import TrustError
from distflow.observe.writing.timing import Waits
from distflow.rollout.engine import WeightReceipt
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.weight_sync import sender
from distflow.runtime.weight_sync.protocol import check_receipt
from distflow.runtime.weight_sync.receiver import WeightReceiver
from distflow.runtime.weight_sync.sender import WeightSender, buckets
from distflow.scheduling.group_states import Version


def weights(*sizes: int) -> list[tuple[str, Tensor]]:
    """float32 tensors of so many numbers."""
    return [(f"w{i}", torch.arange(float(size))) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "parts"),
    [
        ((), 8, []),
        ((1, 1, 1), 8, [["w0", "w1"], ["w2"]]),
        ((1, 1), 100, [["w0", "w1"]]),
        ((1, 9, 1), 8, [["w0"], ["w1"], ["w2"]]),  # too large for any bucket: one of its own
        ((9, 1, 1), 8, [["w0"], ["w1", "w2"]]),
        ((2, 2), 8, [["w0"], ["w1"]]),
    ],
)
def test_buckets_are_neighbours_up_to_a_size(sizes, max_bytes, parts):
    assert [[name for name, _ in bucket] for bucket in buckets(weights(*sizes), max_bytes)] == parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1e30, -1e30, 3.4e38, float("nan"), float("-inf")])
def test_garbage_is_not_served(value, dtype):
    class Broken:
        def weights(self) -> Iterator[tuple[str, Tensor]]:
            return iter([("w0", torch.ones(3)), ("w1", torch.tensor([0.0, value]))])

    port: Any = Port()
    weight_sender = WeightSender(Broken(), port, dtype, sends=True, canary=None, session=None)  # type: ignore[arg-type]
    with pytest.raises(TrustError, match="version 3 .*'w1' "):
        weight_sender.sync(Version(0, 3))
    assert "commit" not in port.log


class Port:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def begin(self, version: Version) -> None:
        self.log.append(("begin", version.step))

    def put(self, bucket: Any) -> None:
        self.log.append([(name, tensor.dtype) for name, tensor in bucket])

    def commit(self, hashes: Mapping[str, str]) -> None:
        self.log.append("commit")


class Actor:
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(weights(2, 2))


class Services:
    """Runs coroutines that never wait."""

    def call(self, work: Any) -> Any:
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("it waited")


def weight_sender(port: Port, *, sends: bool = True, canary: Any = None) -> WeightSender:
    return WeightSender(
        Actor(), port, torch.bfloat16, sends=sends, canary=canary, session=Services()
    )  # type: ignore[arg-type]


def test_a_version_is_pushed_in_buckets_of_the_engine_s_dtype(monkeypatch):
    monkeypatch.setattr(sender, "BUCKET_BYTES", 4)
    port = Port()
    assert weight_sender(port).sync(Version(0, 3)) == {}
    assert port.log == [("begin", 3), [("w0", torch.bfloat16)], [("w1", torch.bfloat16)], "commit"]


def test_an_engine_on_the_trainer_s_storage_is_only_told():
    port = Port()
    weight_sender(port, sends=False).sync(Version(0, 3))
    assert port.log == [("begin", 3), "commit"]


class Engine:
    """Takes weights as it should, but for what a case makes wrong."""

    def __init__(self, skipped: str = "", claimed: str = "", behind: int = 0) -> None:
        self.version = Version(0, 0)
        self._skipped = skipped
        self._claimed = claimed
        self._behind = behind
        self._held: dict[str, str] = {"w0": "old", "w1": "old"}

    async def hashes(self) -> dict[str, str]:
        return self._held

    async def load_weights(self, version: Version, weights: Any) -> WeightReceipt:
        if weights is None:
            self.version = version
            return WeightReceipt(version, version_only=True)

        sent = stripe_hashes(weights)
        self._held = self._held | {name: own for name, own in sent.items() if name != self._skipped}
        self.version = replace(version, step=version.step - self._behind)
        return WeightReceipt(
            version, self._held | {name: sent[name] for name in sent if name == self._claimed}
        )


def receive_from(engine: Engine) -> Any:
    return WeightReceiver(engine, Services(), Waits())  # type: ignore[arg-type]


def test_a_receiver_asks_the_engine_what_it_holds():
    engine = Engine()
    sent = stripe_hashes(weights(1, 2))
    receive = receive_from(engine)
    assert receive(Version(0, 2), weights(1, 2)) == WeightReceipt(Version(0, 2), sent)
    assert receive(Version(0, 3), None) == WeightReceipt(Version(0, 3), sent, version_only=True)


def test_an_engine_that_serves_another_version_than_it_claims_is_refused():
    with pytest.raises(TrustError, match=r"receipt .*step=2\), .*step=1\)"):
        receive_from(Engine(behind=1))(Version(0, 2), weights(1, 2))


def test_an_engine_that_claims_what_it_does_not_hold_is_refused():
    receipt = receive_from(Engine(skipped="w1", claimed="w1"))(Version(0, 2), weights(1, 2))
    with pytest.raises(TrustError, match="different tensors: w1$"):
        check_receipt(receipt, Version(0, 2), stripe_hashes(weights(1, 2)))


def test_versions_are_sent_in_their_order():
    made = weight_sender(Port())
    made.sync(Version(1, 3))
    for older in (Version(0, 4), Version(1, 3), Version(1, 2)):
        with pytest.raises(TrustError, match="backwards"):
            made.sync(older)
