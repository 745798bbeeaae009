"""Batches between real processes of Ray: exact through any chain of widths, and no wait without
an end."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from distflow.cluster.shared_reshard import SharedReshard
from distflow.data.batch import Batch
from distflow.scheduling.reshard_writers_to_readers import Key, ReshardError
from tests.cluster.exchange_worker import Peer, made

pytestmark = pytest.mark.slow

STEP, NEXT = Key("rollout to actor", 3, 2), Key("rollout to actor", 4, 3)
Start = Callable[..., ActorHandle]


@pytest.fixture(scope="module")
def peers(on_ray):
    """Two workers that several tests use; they join each test's exchange."""
    return [Peer.remote() for _ in range(2)]


@pytest.fixture
def start(peers):
    """Starts an exchange of the test's own, which the peers join."""
    started: list[ActorHandle] = []

    def start() -> ActorHandle:
        started.append(ray.remote(SharedReshard).options(num_cpus=0, max_concurrency=8).remote())
        ray.get([peer.join.remote(started[0]) for peer in peers])
        return started[0]

    yield start
    for actor in started:
        ray.kill(actor)


def columns(batch: Batch) -> dict[str, object]:
    return {
        name: batch[name].tolist() if torch.is_tensor(batch[name]) else batch[name]
        for name in batch.names
    }


def wait_until_it_waits(peer: ActorHandle, what: str) -> None:
    for _ in range(2000):
        if any(what in wait for wait in ray.get(peer.waiting.remote())):
            return
        time.sleep(0.005)
    raise AssertionError(f"it never waited for {what}")


def uids(batch: Batch) -> list[str]:
    return list(batch["uid"])


def test_from_one_rank_to_two_to_one_is_exact(start, peers):
    start()
    whole = made(0, 5)
    ray.get(peers[0].make.remote(0, 5))

    for num_writers, wanted in ((1, [uids(whole)[::2], uids(whole)[1::2]]), (2, [uids(whole)])):
        key = Key(f"{num_writers} to {len(wanted)}", 4, 3)
        picks = [
            peers[rank].pick.remote(key, rank, len(wanted), mine)
            for rank, mine in enumerate(wanted)
        ]
        for rank in range(len(wanted)):
            wait_until_it_waits(peers[rank], "step 4")
        ray.get(
            [peers[writer].put.remote(key, writer, num_writers) for writer in range(num_writers)]
        )
        shares = ray.get(picks)
        assert [uids(share) for share in shares] == wanted

    assert columns(shares[0]) == columns(whole)


def test_a_writer_that_was_killed_leaves_nobody_waiting(start, peers):
    """What it had put is read whole or named as lost, as Ray finds it; what it still should have
    put never comes."""
    exchange = start()
    doomed = Peer.remote()
    ray.get([doomed.join.remote(exchange), doomed.make.remote(0, 2)])
    ray.get(doomed.put.remote(STEP, 0, 1))
    later = peers[0].pick.remote(NEXT, 0, 1, uids(made(0, 2)))
    wait_until_it_waits(peers[0], "step 4")
    os.kill(ray.get(doomed.pid.remote()), signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(doomed.waiting.remote())

    try:
        assert columns(ray.get(peers[1].pick.remote(STEP, 0, 1, uids(made(0, 2))))) == columns(
            made(0, 2)
        )
    except ReshardError as lost:
        assert f"samples of {STEP} are lost, because one of their writers [0] has died" in str(lost)

    ray.get(exchange.fail.remote(ReshardError("worker 2 died")))
    with pytest.raises(ReshardError, match="worker 2 died"):
        ray.get(later)
    with pytest.raises(ReshardError, match="worker 2 died"):
        ray.get(peers[1].put.remote(NEXT, 0, 1))


def test_an_exchange_that_was_killed_is_named(start, peers):
    exchange = start()
    share = peers[0].pick.remote(STEP, 0, 1, [])
    wait_until_it_waits(peers[0], "step 3")
    ray.kill(exchange)
    with pytest.raises(ReshardError, match="coordinator has ended"):
        ray.get(share)
