"""The weight edge to engines in other processes: buckets in the object store, receipts back."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt
from distflow.runtime import faults
from distflow.runtime.ports.weights import Bucket, Detach, Receive, WeightPort, check_receipt, refused
from distflow.runtime.ray_members import Members
from distflow.runtime.waits import Waits

Packed = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]
"""Of each tensor its name, dtype and shape, and its bytes."""


class Fleet:
    """The engines of other processes, from the one trainer that pushes to them.

    A bucket is one object, which goes to all of them; it is gone when each has copied it, and before the next is there.
    Who dies on the way, or is late, is passed over from then on: whoever comes in its place has nothing of the version.
    Used by the learning thread alone.
    """

    def __init__(self, members: Members, timeout_s: float | None, waits: Waits) -> None:
        """timeout_s: that one bucket may take to arrive everywhere, or a version to be taken, None for ever."""
        self.confirmed = Version(0, 0)  # as they are built
        self._members, self._timeout_s, self._waits = members, timeout_s, waits
        self._version: Version | None = None
        self._taking: dict[int, Any] = {}  # workers by rank
        self._under_way: dict[int, Any] = {}
        self._num_buckets = 0

    def begin(self, version: Version) -> None:
        """See `WeightPort`; for those that do not serve the version yet."""
        self._version, self._taking = version, self._members.without(version)
        self._under_way, self._num_buckets = {}, 0

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is pushed"
        self._finish_bucket(self._version)
        if not self._taking:
            return
        number, sent = self._num_buckets, (ray.put(pack(bucket)),)
        self._under_way = {rank: each.take.remote(self._version, number, sent) for rank, each in self._taking.items()}
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

    def _finish_bucket(self, version: Version) -> None:
        if self._under_way:
            answered = self._answers(self._under_way, version)
            self._taking = {rank: worker for rank, worker in self._taking.items() if rank in answered}
            self._under_way = {}

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
            with self._waits("learner", what, on=on):
                return self._members.answers(asked, f"the {what}", self._timeout_s)
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


class Arrivals:
    """The weight port of a worker that does not train. A version is put together beside the weights of its engine,
    which serves them until all of the new ones are there; of one that is begun and not ended nothing is left when the
    next begins. `take` and `serve` are called from outside, one after another."""

    confirmed = None  # it sends nothing

    def __init__(self) -> None:
        self.ready: Future[None] = Future()  # once a first version is served
        self._receive: Receive | None = None
        self._attached = threading.Event()
        self._version: Version | None = None
        self._buckets: list[list[tuple[str, Tensor]]] = []

    def attach(self, receive: Receive) -> Detach:
        """See `WeightPort`."""
        self._receive = receive
        self._attached.set()
        return lambda: None

    def take(self, version: Version, number: int, sent: "tuple[ray.ObjectRef[Any]]") -> None:
        """A bucket of a version, copied out of the object store. number: from 0; the first one begins the version.
        Raises ValueError where one before is missing."""
        faults.reach("weights.take")
        if number == 0:
            self._version, self._buckets = version, []
        if (version, number) != (self._version, len(self._buckets)):
            raise ValueError(
                f"bucket {number} of {version} came behind {len(self._buckets)} buckets of {self._version}"
            )
        self._buckets.append(unpack(ray.get(sent[0])))

    def serve(self, version: Version, num_buckets: int | None) -> Receipt:
        """The engine takes the version that has come, None the one that it has under another number. Waits until the
        worker has begun. Raises ValueError where buckets are missing, and as `Receive`."""
        buckets, self._buckets = self._buckets, []
        if num_buckets and (version, num_buckets) != (self._version, len(buckets)):
            raise ValueError(f"{len(buckets)} buckets of {self._version} came, not {num_buckets} of {version}")
        self._attached.wait()
        assert self._receive is not None, "it is attached"
        weights = None if num_buckets is None else [each for bucket in buckets for each in bucket]
        receipt = self._receive(version, weights)
        if not self.ready.done():
            self.ready.set_result(None)
        return receipt

    def begin(self, version: Version) -> None:
        raise AssertionError("a worker that trains nothing publishes nothing")

    def put(self, bucket: Bucket) -> None:
        raise AssertionError("a worker that trains nothing publishes nothing")

    def commit(self, hashes: Mapping[str, str]) -> None:
        raise AssertionError("a worker that trains nothing publishes nothing")

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        raise AssertionError("a worker that trains nothing publishes nothing")


def pack(weights: Bucket) -> Packed:
    """Their own memory seen as bytes, where it is the CPU's."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor))
        for name, tensor in weights
    ]


def unpack(packed: Packed) -> list[tuple[str, Tensor]]:
    """Each in memory of its own: what arrives may be shared, and is read-only."""
    return [
        (name, torch.from_numpy(values.copy()).view(getattr(torch, dtype)).view(shape))
        for name, dtype, shape, values in packed
    ]


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    values: NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return values
