"""Workers of other processes that only hold weights, and who sends some to them."""

import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from torch import Tensor

from distflow.cluster.collective_weight_transport import Pairs
from distflow.cluster.weights_to_workers import RayWeights, WeightReceivers, put_in_store
from distflow.observe.writing.timing import Waits
from distflow.rollout.engine import WeightReceipt
from distflow.rollout.engine_weights import copy_weights, stripe_hashes
from distflow.runtime import fault_injection
from distflow.runtime.weight_sync.bucket_files import Carry, Packed, SentBucket, write_bucket
from distflow.runtime.weight_sync.receiver import IncomingWeights
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.scheduling.group_states import Version

SHAPES = {
    "a": (300, 1000),
    "b": (250, 1000),
    "c": (300, 1000),
    "tied": (5,),
    "scalar": (),
    "d": (280, 1000),
}
BUCKET_BYTES = 1_300_000  # one of the large ones
ONE = Version(0, 1)
TWO = Version(0, 2)
THREE = Version(0, 3)


def weights(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


class Holder(torch.nn.Module):
    """What an engine computes with."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))


class Away:
    """A worker's process with an engine that only holds weights."""

    def __init__(self) -> None:
        self._incoming = IncomingWeights()
        self._model = Holder()
        self._served = Version(0, 0)
        self._incoming.attach(self)
        on_loopback()

    def __call__(self, version: Version, weights: Any) -> WeightReceipt:
        hashes = copy_weights(self._model, weights) if weights is not None else self._hashes()
        self._served = version
        return WeightReceipt(version, hashes, version_only=weights is None)

    def start(self, version: Version, weights: Any) -> Future[WeightReceipt]:
        raise AssertionError("a version that came from elsewhere is whole")

    def arm(self, rank: int) -> None:
        fault_injection.arm(rank)

    def receive(self, *bucket: Any) -> None:
        self._incoming.receive(*bucket)

    def load(self, *version: Any) -> WeightReceipt:
        return self._incoming.load(*version)

    def spoil(self) -> None:
        with torch.no_grad():
            self._model.b.add_(1)

    def state(self) -> tuple[int, Version, dict[str, str]]:
        return os.getpid(), self._served, self._hashes()

    def _hashes(self) -> dict[str, str]:
        return stripe_hashes(self._model.named_parameters())


def start_workers(*ranks: int) -> dict[int, Any]:
    """That are there when this returns, however long their processes take to start."""
    workers = {
        rank: ray.remote(Away).options(num_cpus=0, max_concurrency=4).remote() for rank in ranks
    }
    states(workers)
    return workers


def pid_of(worker: Any) -> int:
    return int(ray.get(worker.state.remote())[0])


def states(workers: Mapping[int, Any]) -> list[tuple[Version, dict[str, str]]]:
    return [ray.get(worker.state.remote())[1:] for worker in workers.values()]


def rollout_workers_of(
    workers: Mapping[int, Any], note: Callable[[str], None] = pytest.fail
) -> WeightReceivers:
    members = WeightReceivers(note)
    for rank, worker in workers.items():
        members.join(rank, worker)
    return members


def weights_to(
    members: WeightReceivers,
    carry: Carry = put_in_store,
    timeout_s: float = 60,
    waits: Waits | None = None,
) -> RayWeights:
    return RayWeights(LocalWeights(Waits()), members, carry, timeout_s, waits or Waits())


def fleet_of(workers: Mapping[int, Any], carry: Carry = put_in_store) -> RayWeights:
    return weights_to(rollout_workers_of(workers), carry)


def carrier(name: str, run_dir: Path, timeout_s: float = 60) -> Carry:
    if name == "collective":
        on_loopback()
        return Pairs(run_dir, "cpu", timeout_s)
    return put_in_store if name == "store" else partial(write_bucket, run_dir)


class Trainer:
    """Gives its weights one by one, and looks each time at how many bytes are on their way."""

    def __init__(self, seed: int, on_their_way: Callable[[], int] = lambda: 0) -> None:
        self._weights = weights(seed)
        self.seen = list[int]()
        self._on_their_way = on_their_way

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for each in self._weights:
            self.seen.append(self._on_their_way())
            yield each


class Watched:
    """A `Carry` of which one sees how many bytes it was given that somebody still holds."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry
        self._seen = list[weakref.ref[Any]]()

    def __call__(
        self, version: Version, number: int, packed: Packed, to: Collection[int]
    ) -> Mapping[int, SentBucket]:
        self._seen += [weakref.ref(values) for *_, values in packed]
        return self._carry(version, number, packed, to)

    def held_bytes(self) -> int:
        return sum(values.nbytes for seen in self._seen if (values := seen()) is not None)


def on_loopback() -> None:
    """Process groups of this process, as those of a run on one machine."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def stored_bytes() -> int:
    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return int(reply.store_stats.object_store_bytes_used)


def file_bytes(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.rglob("*.safetensors"))


def publisher(trainer: Any, port: Any) -> WeightSender:
    session: Any = None
    return WeightSender(trainer, port, torch.float32, sends=True, canary=None, session=session)


def within(what: Callable[[], bool], otherwise: str, seconds: float = 60) -> None:
    since = time.monotonic()
    while not what():
        assert time.monotonic() - since < seconds, otherwise
        time.sleep(0.05)
