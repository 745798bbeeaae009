"""The weight edge to engines in other processes, which are real ones on a real Ray."""

from functools import partial

import pytest
import ray

from distflow.cluster.weights_to_workers import put_in_store
from distflow.errors import TrustError
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.weight_sync import sender
from distflow.runtime.weight_sync.bucket_files import hash_of
from distflow.scheduling.group_states import Version
from tests.cluster.fleet import (
    BUCKET_BYTES,
    ONE,
    THREE,
    TWO,
    Trainer,
    Watched,
    carrier,
    file_bytes,
    fleet_of,
    publisher,
    start_workers,
    states,
    stored_bytes,
    weights,
    within,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers(on_ray):
    made = start_workers(2, 5)
    yield made
    for worker in made.values():
        ray.kill(worker)


@pytest.mark.parametrize("way", ["store", "disk", "collective"])
def test_a_version_arrives_at_all_bucket_by_bucket_and_leaves_nothing_behind(
    workers, tmp_path, way, monkeypatch
):
    monkeypatch.setattr(sender, "BUCKET_BYTES", BUCKET_BYTES)
    watched = Watched(carrier(way, tmp_path))
    on_their_way = {"store": stored_bytes, "disk": partial(file_bytes, tmp_path)}.get(
        way, watched.held_bytes
    )
    version = {"store": ONE, "disk": TWO, "collective": THREE}[way]
    trainer = Trainer(version.step, on_their_way)
    before = on_their_way()
    port = fleet_of(workers, watched)
    publisher(trainer, port).sync(version)
    assert (
        states(workers) == [(version, stripe_hashes(weights(version.step)))] * 2
        and port.confirmed == version
    )
    assert 0 < max(trainer.seen) - before < 2 * BUCKET_BYTES, "more than one bucket was on its way"
    within(lambda: on_their_way() <= before, "what all have read stays where it was")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["store", "disk", "collective"])
def test_a_version_that_is_broken_off_is_served_by_nobody_and_is_no_part_of_the_next(
    workers, tmp_path, way
):
    first = {"store": 1, "disk": 4, "collective": 7}[way]
    versions = [Version(1, first + i) for i in range(3)]
    fleet = fleet_of(workers, carrier(way, tmp_path))
    publisher(Trainer(1), fleet).sync(versions[0])
    fleet.begin(versions[1])
    fleet.put(weights(7)[:2])
    fleet.put(weights(7)[2:3])
    assert states(workers) == [(versions[0], stripe_hashes(weights(1)))] * 2, (
        "they serve on what they have"
    )
    publisher(Trainer(3), fleet).sync(versions[2])
    assert (
        states(workers) == [(versions[2], stripe_hashes(weights(3)))] * 2
        and fleet.confirmed == versions[2]
    )
    assert list(tmp_path.iterdir()) == []


def test_buckets_of_two_versions_are_never_put_together(workers):
    worker = workers[2]
    empty = (put_in_store(THREE, 0, [], [2])[2], hash_of([]))
    took = ray.get(worker.state.remote())[1:]
    assert ray.get(worker.receive.remote(Version(2, 1), 0, *empty)) is None

    with pytest.raises(
        ValueError, match="bucket 1 of Version.*step=2.* 1 buckets of Version.*step=1"
    ):
        ray.get(worker.receive.remote(Version(2, 2), 1, *empty))

    with pytest.raises(ValueError, match="1 buckets of .* not 2 of "):
        ray.get(worker.load.remote(Version(2, 1), 2))
    assert ray.get(worker.state.remote())[1:] == took


def test_receipts_of_all_are_compared_by_the_name_of_the_worker(workers):
    fleet = fleet_of(workers)
    publisher(Trainer(1), fleet).sync(Version(3, 1))
    fleet.renumber(Version(3, 2), stripe_hashes(weights(1)))
    assert fleet.confirmed == Version(3, 2)
    ray.get(workers[5].spoil.remote())

    with pytest.raises(TrustError, match="worker 5 .* differ: b"):
        fleet.renumber(Version(3, 3), stripe_hashes(weights(1)))

    fleet.begin(Version(3, 4))
    with pytest.raises(TrustError, match="version 4: .*: missing"):
        fleet.put(weights(1)[:3])
        fleet.commit({})

    assert fleet.confirmed == Version(3, 2)
