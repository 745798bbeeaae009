"""The weight edge to engines in other processes: buckets in the object store, receipts back."""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayTaskError
from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt
from distflow.runtime.checks import TrustError
from distflow.runtime.ports.weights import Bucket, Detach, Receive, WeightPort, check_receipt, refused
from distflow.runtime.waits import Waits

Packed = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]
"""Of each tensor its name, dtype and shape, and its bytes."""


class Fleet:
    """The engines of other processes, from the one trainer that pushes to them.

    A bucket is one object, which goes to all of them; it is gone when each has copied it, and before the next is there.
    Used by the learning thread alone.
    """

    def __init__(self, workers: Mapping[int, Any], timeout_s: float | None, waits: Waits) -> None:
        """workers: handles of their actors, by rank. timeout_s: that one bucket may take to arrive everywhere, or a
        version to be taken, None for ever."""
        self.confirmed = Version(0, 0)  # as they are built
        self._workers, self._timeout_s, self._waits = workers, timeout_s, waits
        self._version: Version | None = None
        self._under_way: dict[int, Any] = {}
        self._num_buckets = 0

    def begin(self, version: Version) -> None:
        """See `WeightPort`."""
        self._version, self._under_way, self._num_buckets = version, {}, 0

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`. Raises TrustError naming the workers where the one before did not arrive in time."""
        assert self._version is not None, "a version is begun before it is pushed"
        self._answers(self._under_way, self._version)
        number, sent = self._num_buckets, (ray.put(pack(bucket)),)
        self._under_way = {rank: each.take.remote(self._version, number, sent) for rank, each in self._workers.items()}
        self._num_buckets += 1

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is committed"
        self._answers(self._under_way, self._version)
        self._serve(self._version, self._num_buckets, hashes)
        self._version, self._under_way = None, {}

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        self._serve(version, None, hashes)

    def _serve(self, version: Version, num_buckets: int | None, hashes: Mapping[str, str]) -> None:
        asked = {rank: worker.serve.remote(version, num_buckets) for rank, worker in self._workers.items()}
        for rank, receipt in self._answers(asked, version).items():
            check_receipt(receipt, version, hashes, f" of worker {rank}")
        self.confirmed = version

    def _answers(self, asked: Mapping[int, Any], version: Version) -> dict[int, Any]:
        """By rank. Raises TrustError naming those that did not answer in time."""
        if not asked:
            return {}
        try:
            with self._waits("learner", f"weights of step {version.step}", on=_named(asked)):
                return dict(zip(asked, ray.get(list(asked.values()), timeout=self._timeout_s), strict=True))
        except RayTaskError as err:
            raise refused(version, err.cause) if isinstance(err.cause, ValueError) else err.cause from err
        except GetTimeoutError as err:
            done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
            late = _named([rank for rank, ref in asked.items() if ref not in done])
            raise TrustError(
                f"the weights of version {version.step} did not arrive within {self._timeout_s} s at {late}: see "
                "whether they are alive, or raise actor_rollout_ref.rollout.timeout_s"
            ) from err


def _named(ranks: Iterable[int]) -> str:
    return ", ".join(f"worker {rank}" for rank in ranks)


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
