"""The weight port of a process that only generates: versions that come from another process, bucket by bucket."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future

from torch import Tensor

from distflow.rollout.engine import Receipt
from distflow.runtime import fault_injection
from distflow.runtime.weight_sync.buckets import SentBucket, Spoiled, hash_of, pack
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive
from distflow.scheduling.groups import Version


class Arrivals:
    """The weight port of a worker that does not train. A version is collected beside the weights of its engine, which
    uses these until all of the new ones are there; an incomplete version is discarded when the next begins. `take` and
    `serve` are called from outside, one after another."""

    confirmed = None  # it sends nothing

    def __init__(self) -> None:
        self.ready: Future[None] = Future()  # set after the first version is loaded
        self._receive: Receive | None = None
        self._attached = threading.Event()
        self._version: Version | None = None
        self._buckets: list[list[tuple[str, Tensor]]] = []

    def attach(self, receive: Receive) -> Detach:
        """See `WeightPort`."""
        self._receive = receive
        self._attached.set()
        return lambda: None

    def take(self, version: Version, number: int, sent: SentBucket, wanted: str) -> str | None:
        """Receive a bucket of a version. number: from 0; the first one begins the version. wanted: its hash. Returns
        None, or why it was rejected: it may be sent again. Raises ValueError if an earlier one is missing, UserError if
        it is not visible from here."""
        fault_injection.reach("weights.take")
        if number == 0:
            self._version, self._buckets = version, []
        if (version, number) != (self._version, len(self._buckets)):
            raise ValueError(f"bucket {number} of {version} came after {len(self._buckets)} buckets of {self._version}")
        buckets = self._buckets  # whatever is begun meanwhile
        try:
            weights = sent.get()
        except Spoiled as err:
            return str(err)
        arrived = pack(weights)
        fault_injection.reach("weights.arrived", next((values.data for *_, values in arrived), None))
        if hash_of(arrived) != wanted:
            return "its bytes are not those that were sent, by their hash"
        buckets.append(weights)
        return None

    def serve(self, version: Version, num_buckets: int | None) -> Receipt:
        """The engine loads the received version; num_buckets None: its own weights under another number. Waits until
        the worker has started. Raises ValueError if buckets are missing, and as `Receive`."""
        fault_injection.reach("weights.serve")
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
        raise AssertionError("a worker that does not train sends no weights")

    def put(self, bucket: Bucket) -> None:
        raise AssertionError("a worker that does not train sends no weights")

    def commit(self, hashes: Mapping[str, str]) -> None:
        raise AssertionError("a worker that does not train sends no weights")

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        raise AssertionError("a worker that does not train sends no weights")
