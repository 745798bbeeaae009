"""The rollout workers in other processes: which ones run, which weights they have, and how they get
new ones.

Buckets of weights are sent through Ray's object store, files or process groups, and receipts come
back.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distflow.cluster.remote_calls import kill, reply
from distflow.errors import UserError
from distflow.observe.writing.timing import Waits
from distflow.runtime.rollout_loop.loop_thread import on_a_thread
from distflow.runtime.validation_results import ValidationResults
from distflow.runtime.weight_sync.bucket_files import (
    Carry,
    Packed,
    SentBucket,
    Spoiled,
    hash_of,
    pack,
    unpack,
)
from distflow.runtime.weight_sync.protocol import Bucket, WeightPort, check_receipt, refused
from distflow.scheduling.group_states import Version

if TYPE_CHECKING:
    import ray


class WeightReceivers:
    """The rollout workers, by rank. They join on one thread while another calls them. One that dies
    or does not reply in time is removed; the supervisor notices that it is gone."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """note: called with the reason if one was removed, and with other warnings."""
        self.note = note
        self._workers: dict[int, Any] = {}
        self._versions: dict[int, Version] = {}  # versions of those that have weights
        self._lock = threading.Lock()

    def join(self, rank: int, worker: Any) -> None:
        """Add a worker without weights, replacing the previous one."""
        with self._lock:
            self._workers[rank] = worker
            self._versions.pop(rank, None)

    def loaded(self, rank: int, worker: Any, version: Version) -> None:
        """The worker has the version; ignored if another one has replaced it meanwhile, which has
        no weights."""
        with self._lock:
            if self._workers.get(rank) is worker:
                self._versions[rank] = version

    def without(self, version: Version) -> dict[int, Any]:
        """The workers that have another version, or none."""
        with self._lock:
            return {
                rank: worker
                for rank, worker in self._workers.items()
                if self._versions.get(rank) != version
            }

    def with_weights(self) -> dict[int, Any]:
        with self._lock:
            return {rank: self._workers[rank] for rank in sorted(self._versions)}

    def with_newest_weights(self) -> dict[int, Any]:
        """The workers with the newest version that any of them has."""
        with self._lock:
            newest = max(self._versions.values(), default=None)
            return {
                rank: self._workers[rank]
                for rank in sorted(self._versions)
                if self._versions[rank] == newest
            }

    def replies(
        self,
        workers: Mapping[int, Any],
        asked: Mapping[int, Any],
        what: str,
        timeout_s: float | None,
    ) -> dict[int, Any]:
        """The replies of those that reply. One that does not within `timeout_s` is killed, since it
        may be between two states; so is one that received damaged weights. Raises what a worker
        raised. workers: those that were asked, which may have been replaced since."""
        from ray.exceptions import RayActorError

        replies = {}
        waiting = {ref: rank for rank, ref in asked.items()}
        for ref in _in_order_of_arrival(asked.values(), timeout_s):
            rank = waiting.pop(ref)
            try:
                replies[rank] = reply(ref)
            except RayActorError:
                why = f"worker {rank} died before it had replied for {what}"
                self._remove(rank, workers[rank], why)
            except Spoiled as err:
                kill(workers[rank])
                why = f"worker {rank} rejected {what}, and is killed: {err}"
                self._remove(rank, workers[rank], why)

        for rank in waiting.values():
            kill(workers[rank])
            why = f"worker {rank} did not reply for {what} within {timeout_s:g} s"
            why += " (actor_rollout_ref.rollout.timeout_s), and is killed"
            self._remove(rank, workers[rank], why)

        return replies

    def validate(self, step: int) -> list[ValidationResults]:
        """Each worker with the newest weights generates for a part of the validation prompts; if it
        dies, another one takes over its part. Empty if none is left."""
        num_parts = len(self.with_newest_weights())
        results = dict[int, ValidationResults]()
        while len(results) < num_parts:
            workers = self.with_newest_weights()
            if not workers:
                break

            left = [part for part in range(num_parts) if part not in results]
            parts = dict(zip(workers, left, strict=False))
            asked = {}
            for rank, part in parts.items():
                asked[rank] = workers[rank].validate.remote(step, part, num_parts)

            replies = self.replies(workers, asked, f"the validation after step {step}", None)
            for rank, validated in replies.items():
                results[parts[rank]] = validated

        if len(results) < max(num_parts, 1):
            self.note(f"no rollout worker is left, so there is no validation after step {step}")
            return []

        return [results[part] for part in range(num_parts)]

    def _remove(self, rank: int, worker: Any, why: str) -> None:
        with self._lock:
            if self._workers.get(rank) is worker:
                del self._workers[rank]
                self._versions.pop(rank, None)
        self.note(why)


def _in_order_of_arrival(refs: Collection[Any], timeout_s: float | None) -> Iterator[Any]:
    """The references whose results come within the time, each as soon as it is there."""
    import ray

    begin = time.monotonic()
    waiting = list(refs)
    while waiting:
        left_s = timeout_s
        if timeout_s is not None:
            left_s = max(0.0, begin + timeout_s - time.monotonic())

        done, waiting = ray.wait(waiting, timeout=left_s)
        if not done:
            return
        yield from done


class Stalled(RuntimeError):
    """Weights cannot be stored where workers read them."""


@dataclass(frozen=True)
class InStore:
    """A `SentBucket` in Ray's object store, which is freed with this reference. Bytes are arrays
    there, which it shares."""

    ref: "ray.ObjectRef[Any]"

    def get(self) -> list[tuple[str, Tensor]]:
        import ray

        shared = ray.get(self.ref)  # read-only
        return unpack([(*about, torch.from_numpy(values.copy())) for *about, values in shared])

    def drop(self) -> None:
        """Nothing to do."""


def put_in_store(
    version: Version, number: int, packed: Packed, to: Collection[int]
) -> dict[int, InStore]:
    """See `Carry`."""
    import ray

    return dict.fromkeys(
        to, InStore(ray.put([(*about, values.numpy()) for *about, values in packed]))
    )


class RayWeights:
    """The `WeightPort` of the trainer that sends weights to engines of other processes, and to its
    own if it has one.

    A bucket is freed when all of them have copied it, before the next is sent. A worker that dies
    meanwhile, is late, or receives other bytes than were sent, is skipped from then on: its
    replacement has nothing of the version. Only the training thread uses it.
    """

    def __init__(
        self,
        own: WeightPort,
        workers: WeightReceivers,
        carry: Carry,
        timeout_s: float | None,
        waits: Waits,
        device: str = "cpu",
    ) -> None:
        """own: to its own engine. timeout_s: how long one bucket may take to arrive everywhere, or
        a version to be loaded; None for no limit. device: the kind from which `carry` sends."""
        self.confirmed = Version(0, 0)  # the initial weights
        self._own = own
        self._rollout_workers = workers
        self._carry = carry
        self._timeout_s = timeout_s
        self._waits = waits
        self._device = device
        self._version: Version | None = None
        self._receiving: dict[int, Any] = {}
        """The workers that get the version, by rank."""
        self._num_buckets = 0
        self._sent: Mapping[int, SentBucket] = {}
        """What each worker reads of the bucket on its way, by rank."""
        self._asked: dict[int, Any] = {}
        """Their pending replies."""

    def begin(self, version: Version) -> None:
        """Begin a version, which the other workers without it receive."""
        self._own.begin(version)
        self._free_bucket()  # of a sync that was aborted
        self._version = version
        self._receiving = self._rollout_workers.without(version)
        self._num_buckets = 0

    def put(self, bucket: Bucket) -> None:
        assert self._version is not None, "a version is begun before it is sent"
        self._finish_bucket(self._version)
        if self._receiving:
            self._send(self._version, pack(bucket, self._device))
        self._own.put(bucket)

    def commit(self, hashes: Mapping[str, str]) -> None:
        assert self._version is not None, "a version is begun before it is committed"
        self._own.commit(hashes)
        self._finish_bucket(self._version)
        self._load(self._receiving, self._version, self._num_buckets, hashes)
        self._version = None
        self._receiving = {}

    def renumber(self, version: Version, hashes: Mapping[str, str]) -> None:
        self._own.renumber(version, hashes)
        self._load(self._rollout_workers.with_weights(), version, None, hashes)

    def _send(self, version: Version, packed: Packed) -> None:
        number = self._num_buckets
        own_hash = hash_of(packed)
        self._sent = self._put_for_workers(version, number, packed)

        for rank, sent in self._sent.items():
            receive = self._receiving[rank].receive
            self._asked[rank] = receive.remote(version, number, sent, own_hash)

        self._num_buckets += 1

    def _put_for_workers(
        self, version: Version, number: int, packed: Packed
    ) -> Mapping[int, SentBucket]:
        """Put on a separate thread, since a write to a hanging file system never returns. Raises
        Stalled."""
        putting = on_a_thread(partial(self._carry, version, number, packed, self._receiving))
        try:
            with self._waits("training", f"weights of step {version.step}", on="storage"):
                return putting.result(self._timeout_s)
        except TimeoutError as err:
            if putting.done():  # its own
                raise

            raise Stalled(
                f"bucket {number} of the weights of step {version.step} could not be stored for "
                f"the workers within {self._timeout_s:g} s (actor_rollout_ref.rollout.timeout_s): "
                "Ray's object store, or with actor.weight_update_mode=disk the file system of the "
                "run's folder, hangs"
            ) from err

    def _finish_bucket(self, version: Version) -> None:
        """Wait until every worker that still runs has the bucket on its way."""
        if not self._asked:
            return

        has_it = self._replies(self._receiving, self._asked, version)
        self._receiving = {
            rank: worker for rank, worker in self._receiving.items() if rank in has_it
        }
        self._free_bucket()

    def _free_bucket(self) -> None:
        for sent in self._sent.values():
            sent.drop()
        self._sent = {}
        self._asked = {}

    def _load(
        self,
        workers: Mapping[int, Any],
        version: Version,
        num_buckets: int | None,
        hashes: Mapping[str, str],
    ) -> None:
        asked = {rank: worker.load.remote(version, num_buckets) for rank, worker in workers.items()}
        for rank, receipt in self._replies(workers, asked, version).items():
            check_receipt(receipt, version, hashes, f" of worker {rank}")
            self._rollout_workers.loaded(rank, workers[rank], version)
        self.confirmed = version

    def _replies(
        self, workers: Mapping[int, Any], asked: Mapping[int, Any], version: Version
    ) -> dict[int, Any]:
        what = f"weights of step {version.step}"
        on = ", ".join(f"worker {rank}" for rank in asked)
        try:
            with self._waits("training", what, on=on):
                return self._rollout_workers.replies(workers, asked, f"the {what}", self._timeout_s)
        except UserError:
            raise
        except ValueError as err:
            raise refused(version, err) from err
