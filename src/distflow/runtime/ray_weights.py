"""The weight edge to engines in other processes: buckets in the object store, receipts back."""

import threading
from collections.abc import Mapping, Sequence
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
from distflow.runtime.ports.weights import Bucket, Receive

Packed = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]
"""Of each tensor its name, dtype and shape, and its bytes."""


class Fleet:
    """All engines of other processes as one that receives: from the trainer's process, which alone pushes to them."""

    def __init__(self, workers: Sequence[Any], timeout_s: float | None) -> None:
        """workers: handles of their actors. timeout_s: that a version may take to arrive everywhere, None for ever."""
        self._workers, self._timeout_s = workers, timeout_s

    def receive(self, version: Version, weights: Bucket | None) -> Receipt:
        """See `Receive`. The receipt of all: raises TrustError naming the worker that did not answer in time, or that
        holds other weights than the first."""
        sent = None if weights is None else (ray.put(pack(weights)),)
        asked = [worker.receive.remote(version, sent) for worker in self._workers]
        try:
            receipts: list[Receipt] = ray.get(asked, timeout=self._timeout_s)
        except RayTaskError as err:
            raise err.cause from err
        except GetTimeoutError as err:
            done, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
            late = [number for number, ref in enumerate(asked) if ref not in done]
            raise TrustError(
                f"the weights of version {version.step} did not arrive within {self._timeout_s} s at rollout workers "
                f"{', '.join(map(str, late))}: see whether they are alive, or raise "
                "actor_rollout_ref.rollout.timeout_s"
            ) from err
        first = receipts[0]
        for number, receipt in enumerate(receipts):
            if (receipt.version, receipt.hashes) != (first.version, first.hashes):
                raise TrustError(f"rollout worker {number} took other weights than worker 0 as version {version.step}")
        return first


class Arrivals:
    """The weight port of a worker that does not train: its engine takes what comes."""

    def __init__(self) -> None:
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
        return self._receive(version, None if sent is None else unpack(ray.get(sent[0])))

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
