"""The weight edge to engines in other processes, which are real ones on a real Ray."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt
from distflow.rollout.receipts import stripe_hashes
from distflow.rollout.weights import copy_weights
from distflow.runtime import publish
from distflow.runtime.checks import TrustError
from distflow.runtime.ports.local_weights import LocalWeights
from distflow.runtime.publish import Publisher
from distflow.runtime.ray_members import Members
from distflow.runtime.ray_weights import Arrivals, Fleet, RayWeights
from distflow.runtime.waits import Wait, Waits

SHAPES = {"a": (300, 1000), "b": (250, 1000), "c": (300, 1000), "tied": (5,), "scalar": (), "d": (280, 1000)}
BUCKET_BYTES = 1_300_000  # one of the large ones
ONE, TWO, THREE = Version(0, 1), Version(0, 2), Version(0, 3)


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
        self._arrivals, self._model, self._served = Arrivals(), Holder(), Version(0, 0)
        self._arrivals.attach(self)

    def __call__(self, version: Version, weights: Any) -> Receipt:
        hashes = copy_weights(self._model, weights) if weights is not None else self._hashes()
        self._served = version
        return Receipt(version, hashes, alias=weights is None)

    def start(self, version: Version, weights: Any) -> Future[Receipt]:
        raise AssertionError("a version that came from elsewhere is whole")

    def take(self, version: Version, number: int, sent: Any) -> None:
        self._arrivals.take(version, number, sent)

    def serve(self, version: Version, num_buckets: int | None) -> Receipt:
        return self._arrivals.serve(version, num_buckets)

    def spoil(self) -> None:
        with torch.no_grad():
            self._model.b.add_(1)

    def state(self) -> tuple[int, Version, dict[str, str]]:
        return os.getpid(), self._served, self._hashes()

    def _hashes(self) -> dict[str, str]:
        return stripe_hashes(self._model.named_parameters())


@pytest.fixture(scope="module")
def workers(on_ray: None) -> Iterator[dict[int, Any]]:
    made = {rank: ray.remote(Away).options(num_cpus=0, max_concurrency=4).remote() for rank in (2, 5)}
    yield made
    for worker in made.values():
        ray.kill(worker)


def states(workers: dict[int, Any]) -> list[tuple[Version, dict[str, str]]]:
    return [ray.get(worker.state.remote())[1:] for worker in workers.values()]


def fleet_of(
    workers: dict[int, Any],
    timeout_s: float | None = 60,
    waits: Waits | None = None,
    note: Callable[[str], None] = pytest.fail,
) -> Fleet:
    members = Members(note)
    for rank, worker in workers.items():
        members.join(rank, worker)
    return Fleet(members, timeout_s, waits or Waits())


class Trainer:
    """Gives its weights one by one, and looks at how much the object store holds each time."""

    def __init__(self, seed: int) -> None:
        self._weights, self.stored = weights(seed), list[int]()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for each in self._weights:
            self.stored.append(stored_bytes())
            yield each


def stored_bytes() -> int:
    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return int(reply.store_stats.object_store_bytes_used)


def publisher(trainer: Any, port: Any) -> Publisher:
    session: Any = None
    return Publisher(trainer, port, torch.float32, sends=True, canary=None, session=session)


def test_a_version_arrives_at_all_bucket_by_bucket_and_leaves_the_store(
    workers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BUCKET_BYTES", BUCKET_BYTES)
    trainer, before = Trainer(1), stored_bytes()
    port = RayWeights(LocalWeights(Waits()), fleet_of(workers))
    publisher(trainer, port).publish(ONE)
    assert states(workers) == [(ONE, stripe_hashes(weights(1)))] * 2 and port.confirmed == ONE
    assert 0 < max(trainer.stored) - before < 2 * BUCKET_BYTES, "more than one bucket was in the object store"
    within(lambda: stored_bytes() <= before, "what all have read stays in the object store")


def within(what: Callable[[], bool], otherwise: str, seconds: float = 20) -> None:
    since = time.monotonic()
    while not what():
        assert time.monotonic() - since < seconds, otherwise
        time.sleep(0.05)


def test_a_version_that_is_broken_off_is_served_by_nobody_and_is_no_part_of_the_next(workers: dict[int, Any]) -> None:
    fleet = fleet_of(workers)
    publisher(Trainer(1), fleet).publish(TWO)
    fleet.begin(THREE)
    fleet.put(weights(7)[:2])
    fleet.put(weights(7)[2:3])
    assert states(workers) == [(TWO, stripe_hashes(weights(1)))] * 2, "they serve on what they have"
    later = Version(0, 4)
    another = fleet_of(workers)  # of a trainer that came after the one that had died
    publisher(Trainer(3), another).publish(later)
    assert states(workers) == [(later, stripe_hashes(weights(3)))] * 2 and another.confirmed == later


def test_buckets_of_two_versions_are_never_put_together(workers: dict[int, Any]) -> None:
    worker = workers[2]
    took = ray.get(worker.state.remote())[1:]
    sent = (ray.put([]),)
    ray.get(worker.take.remote(Version(1, 1), 0, sent))
    with pytest.raises(ValueError, match="bucket 1 of Version.*step=2.* came behind 1 buckets of Version.*step=1"):
        ray.get(worker.take.remote(Version(1, 2), 1, sent))
    with pytest.raises(ValueError, match="1 buckets of .* came, not 2 of "):
        ray.get(worker.serve.remote(Version(1, 1), 2))
    assert ray.get(worker.state.remote())[1:] == took


def test_receipts_of_all_are_compared_by_the_name_of_the_worker(workers: dict[int, Any]) -> None:
    fleet = fleet_of(workers)
    publisher(Trainer(1), fleet).publish(Version(2, 1))
    fleet.alias(Version(2, 2), stripe_hashes(weights(1)))
    assert fleet.confirmed == Version(2, 2)
    ray.get(workers[5].spoil.remote())
    with pytest.raises(TrustError, match="the engine of worker 5 was to serve .* tensors that differ: b"):
        fleet.alias(Version(2, 3), stripe_hashes(weights(1)))
    fleet.begin(Version(2, 4))
    with pytest.raises(TrustError, match="the engine refused the weights of version 4: .*: missing"):
        fleet.put(weights(1)[:3])
        fleet.commit({})
    assert fleet.confirmed == Version(2, 2)


def test_a_worker_that_does_not_take_its_bucket_in_time_is_killed_and_named(workers: dict[int, Any]) -> None:
    pid = ray.get(workers[5].state.remote())[0]
    told, notes = list[Wait](), list[str]()
    fleet = fleet_of(workers, 1.5, Waits(lambda wait, ended: told.append(wait)), notes.append)
    os.kill(pid, signal.SIGSTOP)
    version = Version(3, 1)
    publisher(SimpleNamespace(weights=lambda: iter(weights(4))), fleet).publish(version)
    assert notes == [
        "worker 5 did not answer for the weights of step 1 within 1.5 s (actor_rollout_ref.rollout.timeout_s), "
        "and is killed"
    ]
    assert [(wait.who, wait.what, wait.on) for wait in told] == [
        ("learner", "weights of step 1", "worker 2, worker 5"),
        ("learner", "weights of step 1", "worker 2"),
    ]
    assert ray.get(workers[2].state.remote())[1:] == (version, stripe_hashes(weights(4)))
    within(lambda: not Path(f"/proc/{pid}").exists(), "it is there still")
