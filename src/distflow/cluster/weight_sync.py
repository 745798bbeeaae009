"""Weight sync to engines in other processes: buckets go through Ray's object store or files, receipts come back."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from torch import Tensor

from distflow.cluster.rollout_workers import RolloutWorkers
from distflow.errors import TrustError, UserError
from distflow.runtime.rollout_services import on_a_thread
from distflow.runtime.spec import Spec
from distflow.runtime.wait_log import Waits
from distflow.runtime.weight_sync.buckets import Carry, Packed, SentBucket, hash_of, pack, unpack, write_bucket
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive, WeightPort, check_receipt, refused
from distflow.scheduling.groups import Version

MAX_SENDS = 3
"""How often a bucket is sent to a worker that rejects it."""


class Stalled(RuntimeError):
    """Weights cannot be stored where the workers read them."""


@dataclass(frozen=True)
class InStore:
    """A bucket in Ray's object store, which frees it with this reference."""

    ref: "ray.ObjectRef[Packed]"

    def get(self) -> list[tuple[str, Tensor]]:
        """See `SentBucket`."""
        shared = ray.get(self.ref)  # read-only
        return unpack([(name, dtype, shape, values.copy()) for name, dtype, shape, values in shared])

    def drop(self) -> None:
        """See `SentBucket`."""


def put_in_store(version: Version, number: int, packed: Packed) -> InStore:
    """See `Carry`."""
    return InStore(ray.put(packed))


def carrier_of(spec: Spec) -> Carry:
    """The one that the config names."""
    return partial(write_bucket, spec.run_dir) if spec.options.weight_update_mode == "disk" else put_in_store


@dataclass
class _InFlight:
    """A bucket that workers are receiving. asked: their pending replies, by rank."""

    number: int
    packed: Packed
    hash: str
    sent: SentBucket
    asked: dict[int, Any]


class Fleet:
    """Sends weights from the one trainer to the engines of other processes.

    A bucket is stored once, for all of them, and removed when each has copied it, before the next is stored. A worker
    that finds other bytes than were sent rejects it, and gets it again, twice.
    A worker that dies meanwhile, or is late, is skipped from then on: its replacement has nothing of the version.
    Used by the training thread alone.
    """

    def __init__(self, members: RolloutWorkers, carry: Carry, timeout_s: float | None, waits: Waits) -> None:
        """timeout_s: how long one bucket may take to arrive everywhere, or a version to be loaded; None is for ever."""
        self.confirmed = Version(0, 0)  # the initial weights
        self._rollout_workers, self._carry, self._timeout_s, self._waits = members, carry, timeout_s, waits
        self._version: Version | None = None
        self._taking: dict[int, Any] = {}  # workers by rank
        self._going: _InFlight | None = None
        self._num_buckets = 0

    def begin(self, version: Version) -> None:
        """See `WeightPort`; for those that do not serve the version yet."""
        if self._going is not None:  # of a sync that was aborted
            self._going.sent.drop()
        self._version, self._taking = version, self._rollout_workers.without(version)
        self._going, self._num_buckets = None, 0

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is sent"
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
        self._serve(self._rollout_workers.with_weights(), version, None, hashes)

    def _send(self, version: Version, number: int, packed: Packed, own_hash: str, to: Container[int]) -> None:
        sent = self._store(version, number, packed)
        workers = {rank: worker for rank, worker in self._taking.items() if rank in to}
        asked = {rank: worker.take.remote(version, number, sent, own_hash) for rank, worker in workers.items()}
        self._going = _InFlight(number, packed, own_hash, sent, asked)

    def _store(self, version: Version, number: int, packed: Packed) -> SentBucket:
        """On a thread of its own, because a write to a file system that hangs never returns. Raises Stalled."""
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
        """Wait until every worker that still runs has the current bucket."""
        num_sent = 1
        while (going := self._going) is not None:
            rejections = self._rejections(going, version)
            self._going = None
            going.sent.drop()
            if not rejections:
                break
            reasons = "; ".join(f"worker {rank}: {why}" for rank, why in sorted(rejections.items()))
            what = f"bucket {going.number} of the weights of step {version.step}"
            if num_sent == MAX_SENDS:
                raise TrustError(
                    f"{what} was sent {MAX_SENDS} times, and was rejected each time ({reasons}). The memory, the disk "
                    "or the network between this process and that one corrupts data: fix that first"
                )
            self._rollout_workers.note(f"{what} was rejected and is sent again ({reasons})")
            self._send(version, going.number, going.packed, going.hash, rejections)
            num_sent += 1

    def _rejections(self, going: _InFlight, version: Version) -> dict[int, str]:
        """Why workers rejected a bucket, by rank."""
        replies = self._replies(going.asked, version)
        gone = going.asked.keys() - replies.keys()
        self._taking = {rank: worker for rank, worker in self._taking.items() if rank not in gone}
        return {rank: why for rank, why in replies.items() if why is not None}

    def _serve(
        self, workers: Mapping[int, Any], version: Version, num_buckets: int | None, hashes: Mapping[str, str]
    ) -> None:
        asked = {rank: worker.serve.remote(version, num_buckets) for rank, worker in workers.items()}
        for rank, receipt in self._replies(asked, version).items():
            check_receipt(receipt, version, hashes, f" of worker {rank}")
            self._rollout_workers.took(rank, version)
        self.confirmed = version

    def _replies(self, asked: Mapping[int, Any], version: Version) -> dict[int, Any]:
        """By rank; see `RolloutWorkers`."""
        what = f"weights of step {version.step}"
        on = ", ".join(f"worker {rank}" for rank in asked)
        try:
            with self._waits("training", what, on=on):
                return self._rollout_workers.replies(asked, f"the {what}", self._timeout_s)
        except UserError:
            raise
        except ValueError as err:
            raise refused(version, err) from err


class RayWeights:
    """The weight port of a training worker that sends to other processes, and to its own engine if it has one."""

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
