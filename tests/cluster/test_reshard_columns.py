"""Batches between real processes of Ray: exact through any chain of widths, bounded, and no wait without an end."""

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from distflow.cluster.reshard_columns import SMALL_BYTES, ReshardActor, packed_metas
from distflow.data.batch import Batch
from distflow.scheduling.reshard_columns import Key, Readers, ReshardError
from tests.cluster.exchange_worker import Peer, made

pytestmark = pytest.mark.slow

STEP, NEXT = Key("rollout to actor", 3, 2), Key("rollout to actor", 4, 3)
Start = Callable[..., ActorHandle]


@pytest.fixture(scope="module")
def peers(on_ray: None) -> list[ActorHandle]:
    """Two workers that several tests use; they join each test's exchange."""
    return [Peer.remote() for _ in range(2)]


@pytest.fixture
def start(peers: list[ActorHandle]) -> Iterator[Start]:
    """Starts an exchange of the test's own, which the peers join."""
    started: list[ActorHandle] = []

    def start(limit_bytes: int = 10**6) -> ActorHandle:
        started.append(ReshardActor.remote(limit_bytes))
        ray.get([peer.join.remote(started[0]) for peer in peers])
        return started[0]

    yield start
    for actor in started:
        ray.kill(actor)


def columns(batch: Batch) -> dict[str, object]:
    return {name: batch[name].tolist() if torch.is_tensor(batch[name]) else batch[name] for name in batch.names}


def wait_until_it_waits(peer: ActorHandle, what: str) -> None:
    for _ in range(2000):
        if any(what in wait for wait in ray.get(peer.waiting.remote())):
            return
        time.sleep(0.005)
    raise AssertionError(f"it never waited for {what}")


def wait_until_empty(exchange: ActorHandle) -> None:
    """Readers let go of what they have read without waiting for it."""
    for _ in range(2000):
        if ray.get(exchange.held_bytes.remote()) == 0:
            return
        time.sleep(0.005)
    raise AssertionError("what was read is held for ever")


def test_from_one_rank_to_two_to_one_is_exact(start: Start, peers: list[ActorHandle]) -> None:
    exchange = start()
    ray.get(peers[0].make.remote(0, 5))
    for num_writers, num_ranks in ((1, 2), (2, 1)):
        key = Key(f"{num_writers} to {num_ranks}", 4, 3)
        gets = [peers[rank].get.remote(key, rank, Readers(num_ranks)) for rank in range(num_ranks)]
        for rank in range(num_ranks):
            wait_until_it_waits(peers[rank], "step 4")
        ray.get([peers[writer].put.remote(key, writer, num_writers) for writer in range(num_writers)])
        shares = ray.get(gets)
        assert sorted(map(len, shares)) == ([6, 9] if num_ranks == 2 else [15])
    assert columns(shares[0]) == columns(made(0, 5))
    wait_until_empty(exchange)


def test_a_selection_is_shipped_and_the_rest_is_let_go(start: Start, peers: list[ActorHandle]) -> None:
    exchange = start()
    ray.get([peers[writer].make.remote(2 * writer, 2) for writer in range(2)])
    ray.get([peers[writer].put.remote(STEP, writer, 2) for writer in range(2)])
    shares = ray.get([peers[rank].get.remote(STEP, rank, Readers(2), select=True) for rank in range(2)])
    uids = [uid for share in shares for uid in share["uid"]]
    assert sorted(uids) == [f"{group}-{index}" for group in range(4) for index in (1, 2)]
    wait_until_empty(exchange)


@pytest.mark.parametrize("num_groups", [2, 8000], ids=["little", "much"])
def test_a_put_beyond_the_bound_waits_until_the_step_before_it_is_read(
    start: Start, peers: list[ActorHandle], num_groups: int
) -> None:
    exchange = start(limit_bytes=1)
    writer, reader = peers
    ray.get(writer.make.remote(0, num_groups))
    ray.get(writer.put.remote(STEP, 0, 1))
    held = ray.get(exchange.held_bytes.remote())
    assert (held > SMALL_BYTES) == (num_groups > 2)
    second = writer.put.remote(NEXT, 0, 1)
    wait_until_it_waits(writer, f"room for {NEXT}")
    assert ray.wait([second], timeout=0) == ([], [second]) and ray.get(exchange.held_bytes.remote()) == held
    assert columns(ray.get(reader.get.remote(STEP, 0, Readers(1)))) == columns(made(0, num_groups))
    ray.get(second)
    assert columns(ray.get(reader.get.remote(NEXT, 0, Readers(1)))) == columns(made(0, num_groups))


def test_a_writer_that_was_killed_leaves_nobody_waiting(start: Start, peers: list[ActorHandle]) -> None:
    """What it had put is read whole or named as lost, as Ray finds it; what it still should have put never comes."""
    exchange, doomed = start(), Peer.remote()
    ray.get([doomed.join.remote(exchange), doomed.make.remote(0, 2)])
    ray.get(doomed.put.remote(STEP, 0, 1))
    later = peers[0].get.remote(NEXT, 0, Readers(1))
    wait_until_it_waits(peers[0], "step 4")
    os.kill(ray.get(doomed.pid.remote()), signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(doomed.waiting.remote())
    try:
        assert columns(ray.get(peers[1].get.remote(STEP, 0, Readers(1)))) == columns(made(0, 2))
    except ReshardError as lost:
        assert f"samples of {STEP} are lost: one of the writers [0] that held them has died" in str(lost)
    ray.get(exchange.fail.remote(ReshardError("worker 2 died")))
    with pytest.raises(ReshardError, match="worker 2 died"):
        ray.get(later)
    with pytest.raises(ReshardError, match="worker 2 died"):
        ray.get(peers[1].put.remote(NEXT, 0, 1))


def test_an_exchange_that_was_killed_is_named(start: Start, peers: list[ActorHandle]) -> None:
    exchange = start()
    share = peers[0].get.remote(STEP, 0, Readers(1))
    wait_until_it_waits(peers[0], "step 3")
    ray.kill(exchange)
    with pytest.raises(ReshardError, match="the exchange has ended"):
        ray.get(share)


def test_what_reaches_the_actor_is_small() -> None:
    batch = made(100_000, 256, samples=8)
    metas = packed_metas(batch, "n" * 56, ("scores",))
    assert len(metas) == 2048 and metas.groups.dtype == np.int64
    assert len(pickle.dumps(metas)) < 64 * 1024
