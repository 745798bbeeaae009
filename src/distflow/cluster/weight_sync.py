"""The weight edge to engines in other processes: buckets by Ray's object store or by files, receipts back."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from torch import Tensor

from distflow.cluster.rollout_workers import Members
from distflow.errors import TrustError, UserError
from distflow.runtime.rollout_services import on_a_thread
from distflow.runtime.spec import Spec
from distflow.runtime.wait_log import Waits
from distflow.runtime.weight_sync.buckets import Carry, Packed, Sent, hash_of, pack, unpack, write_bucket
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive, WeightPort, check_receipt, refused
from distflow.scheduling.groups import Version

MOST_SENT = 3
"""How often a bucket goes to a worker that refuses it."""


class Stalled(RuntimeError):
    """Weights cannot be put where others read them."""


@dataclass(frozen=True)
class InStore:
    """A bucket in Ray's object store, which forgets it with this."""

    ref: "ray.ObjectRef[Packed]"

    def get(self) -> list[tuple[str, Tensor]]:
        """See `Sent`."""
        shared = ray.get(self.ref)  # read-only
        return unpack([(name, dtype, shape, values.copy()) for name, dtype, shape, values in shared])

    def drop(self) -> None:
        """See `Sent`."""


def put_in_store(version: Version, number: int, packed: Packed) -> InStore:
    """See `Carry`."""
    return InStore(ray.put(packed))


def carrier_of(spec: Spec) -> Carry:
    """What the config names."""
    return partial(write_bucket, spec.run_dir) if spec.options.weight_update_mode == "disk" else put_in_store


@dataclass
class _OnItsWay:
    """A bucket that is being taken. asked: by rank."""

    number: int
    packed: Packed
    hash: str
    sent: Sent
    asked: dict[int, Any]


class Fleet:
    """The engines of other processes, from the one trainer that pushes to them.

    A bucket is put in one place, for all of them; it is gone when each has copied it, and before the next is there. Who
    finds other bytes than were sent refuses it, and has it again, twice.
    Who dies on the way, or is late, is passed over from then on: whoever comes in its place has nothing of the version.
    Used by the learning thread alone.
    """

    def __init__(self, members: Members, carry: Carry, timeout_s: float | None, waits: Waits) -> None:
        """timeout_s: that one bucket may take to arrive everywhere, or a version to be taken, None for ever."""
        self.confirmed = Version(0, 0)  # as they are built
        self._members, self._carry, self._timeout_s, self._waits = members, carry, timeout_s, waits
        self._version: Version | None = None
        self._taking: dict[int, Any] = {}  # workers by rank
        self._going: _OnItsWay | None = None
        self._num_buckets = 0

    def begin(self, version: Version) -> None:
        """See `WeightPort`; for those that do not serve the version yet."""
        if self._going is not None:  # of one that was broken off
            self._going.sent.drop()
        self._version, self._taking = version, self._members.without(version)
        self._going, self._num_buckets = None, 0

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is pushed"
        self._finish_bucket(self._version)
        if not self._taking:
            return
        packed = pack(bucket)
        self._send(self._version, self._num_buckets, packed, hash_of(packed), self._taking)
        self._num_buckets += 1

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is committed"
        self._finish_bucket(self._version)
        self._serve(self._taking, self._version, self._num_buckets, hashes)
        self._version, self._taking = None, {}

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`; for those that have weights."""
        self._serve(self._members.informed(), version, None, hashes)

    def _send(self, version: Version, number: int, packed: Packed, own_hash: str, to: Container[int]) -> None:
        sent = self._put_down(version, number, packed)
        workers = {rank: worker for rank, worker in self._taking.items() if rank in to}
        asked = {rank: worker.take.remote(version, number, sent, own_hash) for rank, worker in workers.items()}
        self._going = _OnItsWay(number, packed, own_hash, sent, asked)

    def _put_down(self, version: Version, number: int, packed: Packed) -> Sent:
        """On a thread of its own: a file system that hangs lets nobody go who writes to it. Raises Stalled."""
        putting = on_a_thread(partial(self._carry, version, number, packed))
        try:
            with self._waits("training", f"weights of step {version.step}", on="storage"):
                return putting.result(self._timeout_s)
        except TimeoutError as err:
            if putting.done():  # its own
                raise
            raise Stalled(
                f"bucket {number} of the weights of step {version.step} could not be put where workers read it within "
                f"{self._timeout_s:g} s (actor_rollout_ref.rollout.timeout_s): Ray's object store, or with "
                "actor.weight_update_mode=disk the file system of the run's folder, hangs"
            ) from err

    def _finish_bucket(self, version: Version) -> None:
        """Whoever is still there has it."""
        num_sent = 1
        while (going := self._going) is not None:
            refusals = self._refusals(going, version)
            self._going = None
            going.sent.drop()
            if not refusals:
                break
            told = "; ".join(f"worker {rank}: {why}" for rank, why in sorted(refusals.items()))
            what = f"bucket {going.number} of the weights of step {version.step}"
            if num_sent == MOST_SENT:
                raise TrustError(
                    f"{what} was sent {MOST_SENT} times, and was refused each time ({told}). The memory, the disk or "
                    "the network between this process and that one changes what they hold: see to it first"
                )
            self._members.note(f"{what} was refused and is sent again ({told})")
            self._send(version, going.number, going.packed, going.hash, refusals)
            num_sent += 1

    def _refusals(self, going: _OnItsWay, version: Version) -> dict[int, str]:
        """Why a bucket was not taken, by rank."""
        answers = self._answers(going.asked, version)
        gone = going.asked.keys() - answers.keys()
        self._taking = {rank: worker for rank, worker in self._taking.items() if rank not in gone}
        return {rank: why for rank, why in answers.items() if why is not None}

    def _serve(
        self, workers: Mapping[int, Any], version: Version, num_buckets: int | None, hashes: Mapping[str, str]
    ) -> None:
        asked = {rank: worker.serve.remote(version, num_buckets) for rank, worker in workers.items()}
        for rank, receipt in self._answers(asked, version).items():
            check_receipt(receipt, version, hashes, f" of worker {rank}")
            self._members.took(rank, version)
        self.confirmed = version

    def _answers(self, asked: Mapping[int, Any], version: Version) -> dict[int, Any]:
        """By rank; see `Members`."""
        what = f"weights of step {version.step}"
        on = ", ".join(f"worker {rank}" for rank in asked)
        try:
            with self._waits("training", what, on=on):
                return self._members.answers(asked, f"the {what}", self._timeout_s)
        except UserError:
            raise
        except ValueError as err:
            raise refused(version, err) from err


class RayWeights:
    """The weight port of a worker that trains and pushes to other processes, besides to the engine that it may have."""

    def __init__(self, own: WeightPort, fleet: Fleet) -> None:
        self._own, self._fleet = own, fleet

    @property
    def confirmed(self) -> Version:
        """See `WeightPort`."""
        return self._fleet.confirmed

    def attach(self, receive: Receive) -> Detach:
        """See `WeightPort`."""
        return self._own.attach(receive)

    def begin(self, version: Version) -> None:
        """See `WeightPort`."""
        self._own.begin(version)
        self._fleet.begin(version)

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        self._fleet.put(bucket)
        self._own.put(bucket)

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        self._own.commit(hashes)
        self._fleet.commit(hashes)

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        self._own.alias(version, hashes)
        self._fleet.alias(version, hashes)
