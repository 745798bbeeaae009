"""What becomes of weights on their way to other processes that are killed, stopped, or get
different bytes than were sent: real ones on a real Ray, by every way."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from distflow.cluster.collective_weight_transport import InPair
from distflow.observe.writing.timing import Wait, Waits
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime import fault_injection
from distflow.runtime.fault_injection import Fault
from distflow.runtime.weight_sync import sender as publish
from distflow.runtime.weight_sync.bucket_files import (
    Packed,
    SentBucket,
    remove_weights,
)
from distflow.scheduling.group_states import Version
from tests.cluster.fleet import (
    BUCKET_BYTES,
    Trainer,
    carrier,
    fleet_of,
    pid_of,
    publisher,
    rollout_workers_of,
    start_workers,
    states,
    weights,
    weights_to,
    within,
)
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = [pytest.mark.slow, pytest.mark.faults]
TRAINS = 9
"""The rank of a trainer in a process of its own."""


class Sender:
    """A trainer's process."""

    def publish(self, workers: dict[int, Any], way: str, run_dir: Path, version: Version) -> None:
        fault_injection.arm(TRAINS)
        publish.BUCKET_BYTES = BUCKET_BYTES
        publisher(Trainer(version.step), fleet_of(workers, carrier(way, run_dir))).sync(version)


@pytest.fixture(scope="module")
def there(on_ray):
    made = start_workers(2, 5)
    yield made
    for worker in made.values():
        ray.kill(worker)


@pytest.fixture(params=["store", "disk", "collective"])
def way(request):
    return str(request.param)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(publish, "BUCKET_BYTES", BUCKET_BYTES)


_restarts = iter(range(1, 1000))


@pytest.fixture
def workers(there):
    """That serve the first version of a restart of their own."""
    publisher(Trainer(1), fleet_of(there)).sync(first := Version(next(_restarts), 1))
    assert states(there) == served(first) * 2
    return there


def served(version: Version) -> list[tuple[Version, dict[str, str]]]:
    return [(version, stripe_hashes(weights(version.step)))]


def newest(workers: dict[int, Any]) -> Version:
    version: Version = ray.get(workers[2].state.remote())[1]
    return version


def after(version: Version) -> Version:
    return Version(version.restart, version.step + 1)


def arm(workers: dict[int, Any]) -> None:
    ray.get([worker.arm.remote(rank) for rank, worker in workers.items()])


def test_a_flipped_bit_is_found_by_the_hash_and_the_worker_is_replaced(
    workers, way, tmp_path, plan
):
    """In places at which no receipt looks, of the last bucket."""
    plan(Fault("weights.arrived", 3, 4, action="flip"))
    everyone = workers | start_workers(3)
    arm(everyone)
    notes = list[str]()
    version = after(newest(workers))
    members = rollout_workers_of(everyone, notes.append)
    publisher(Trainer(version.step), weights_to(members, carrier(way, tmp_path))).sync(version)
    assert states(workers) == served(version) * 2 and list(members.with_newest_weights()) == [2, 5]
    said = "worker 3 rejected the weights of step 2, and is killed: the hash of bucket 3 differs"
    assert len(notes) == 1 and notes[0].startswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "way", one_fast_in(3, ["store", "disk", "collective"], others=BY_HAND), indirect=True
)
def test_who_dies_or_stops_in_a_weight_update_is_fenced_and_named_and_the_others_have_all_of_it(
    workers, way, tmp_path, plan
):
    """One dies when it is handed the second bucket, one stops at the third, one dies when it has
    all and is to serve it."""
    plan(
        Fault("weights.take", 3, call=2),
        Fault("weights.take", 4, call=3, action="SIGSTOP"),
        Fault("weights.serve", 6, call=1),
    )
    victims = start_workers(3, 4, 6)
    stopped = pid_of(victims[4])
    everyone = workers | victims

    # half of it is for each operation of a process group
    within_s = 10.0 if way == "collective" else 5.0
    arm(everyone)
    told, notes, version = list[Wait](), list[str](), after(newest(workers))
    members = rollout_workers_of(everyone, notes.append)
    carry = carrier(way, tmp_path, within_s)
    fleet = weights_to(members, carry, within_s, Waits(lambda wait, ended: told.append(wait)))
    sender = publisher(Trainer(version.step), fleet)
    sender.sync(version)
    assert notes == [
        "worker 3 died before it had replied for the weights of step 2",
        f"worker 4 did not reply for the weights of step 2 within {within_s:g} s "
        "(actor_rollout_ref.rollout.timeout_s), and is killed",
        "worker 6 died before it had replied for the weights of step 2",
    ]
    assert {(wait.who, wait.what) for wait in told} == {("training", "weights of step 2")}
    asked = [wait.on for wait in told if wait.on != "storage"]
    assert (
        asked[0] == "worker 2, worker 5, worker 3, worker 4, worker 6"
        and asked[-1] == "worker 2, worker 5, worker 6"
    )
    within(lambda: not Path(f"/proc/{stopped}").exists(), "it is there still")
    assert states(workers) == served(version) * 2 and list(members.with_newest_weights()) == [2, 5]
    come = start_workers(3)[3]
    pid_of(come)  # it has started
    members.join(3, come)
    sender.push_again()
    assert states({3: come}) == served(version) and list(members.with_newest_weights()) == [2, 3, 5]
    assert list(tmp_path.iterdir()) == []
    ray.kill(come)


def test_a_trainer_that_is_killed_while_it_sends_leaves_all_with_what_they_had(
    workers, way, tmp_path, plan
):
    plan(Fault("weights.put", TRAINS, call=2))
    old = newest(workers)
    sender: Any = ray.remote(Sender).options(num_cpus=0).remote()
    with pytest.raises(RayActorError):
        ray.get(sender.publish.remote(workers, way, tmp_path, after(old)))
    assert states(workers) == served(old) * 2
    assert bool(list(tmp_path.rglob("*.safetensors"))) == (way == "disk"), (
        "nothing of it was on its way"
    )
    remove_weights(tmp_path)  # as the next start does
    assert list(tmp_path.iterdir()) == []
    later = Version(old.restart, 3)
    publisher(Trainer(later.step), fleet_of(workers, carrier(way, tmp_path))).sync(later)
    assert states(workers) == served(later) * 2


def test_a_worker_that_cannot_meet_the_trainer_is_replaced(workers, tmp_path):
    notes = list[str]()
    version = after(newest(workers))
    pairs = carrier("collective", tmp_path, 4.0)

    def carry(
        version: Version, number: int, packed: Packed, to: Collection[int]
    ) -> Mapping[int, SentBucket]:
        sent = dict(pairs(version, number, packed, to))
        if number == 1 and 3 in sent:  # it waits where nobody comes
            lost = sent[3]
            assert isinstance(lost, InPair)
            sent[3] = replace(lost, pair=replace(lost.pair, meeting=tmp_path / ".meeting-lost"))
        return sent

    members = rollout_workers_of(workers | start_workers(3), notes.append)
    publisher(Trainer(version.step), weights_to(members, carry)).sync(version)
    assert states(workers) == served(version) * 2
    said = "worker 3 rejected the weights of step 2, and is killed: it was not received through the"
    assert len(notes) == 1 and notes[0].startswith(said)
