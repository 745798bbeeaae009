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
from distflow.runtime.checks import TrustError
from distflow.runtime.ports.weights import Bucket, Receive
from distflow.runtime.ray_members import Members

Packed = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]
"""Of each tensor its name, dtype and shape, and its bytes."""


class Fleet:
    """All engines of other processes as one that receives: from the trainer's process, which alone pushes to them."""

    def __init__(self, members: Members, timeout_s: float | None) -> None:
        """timeout_s: that a version may take to arrive everywhere, None for ever."""
        self._members, self._timeout_s = members, timeout_s

    def receive(self, version: Version, weights: Bucket | None) -> Receipt:
        """See `Receive`. Those that have the version already are passed over, and those that have none where it is an
        alias. The receipt of all: raises TrustError naming a worker that holds other weights than the first."""
        workers = self._members.informed() if weights is None else self._members.without(version)
        sent = None if weights is None or not workers else (ray.put(pack(weights)),)
        asked = {rank: worker.receive.remote(version, sent) for rank, worker in workers.items()}
        receipts: dict[int, Receipt] = self._members.answers(
            asked, f"the weights of version {version.step}", self._timeout_s
        )
        if not receipts:
            return Receipt(version, shared=True)  # nobody has a copy that could differ
        first = receipts[min(receipts)]
        for rank, receipt in receipts.items():
            if (receipt.version, receipt.hashes) != (first.version, first.hashes):
                raise TrustError(
                    f"worker {rank} took other weights than worker {min(receipts)} as version {version.step}"
                )
            self._members.took(rank, version)
        return first


class Arrivals:
    """The weight port of a worker that does not train: its engine takes what comes."""

    def __init__(self) -> None:
        self.ready: Future[None] = Future()  # once a first version is served
        self._receive: Receive | None = None
        self._attached = threading.Event()

    def attach(self, receive: Receive) -> None:
        """See `WeightPort`."""
        self._receive = receive
        self._attached.set()

    def arrived(self, version: Version, sent: "tuple[ray.ObjectRef[Any]] | None") -> Receipt:
        """Waits until the worker has begun. Raises as `Receive`."""
        self._attached.wait()
        assert self._receive is not None, "it is attached"
        faults.reach("weights.take")
        receipt = self._receive(version, None if sent is None else unpack(ray.get(sent[0])))
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
