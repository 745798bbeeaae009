"""Receives weights: passes a version to a worker's engine, and collects one sent by another
process."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain

from torch import Tensor

from distflow.device_transfer import free_bytes
from distflow.errors import TrustError
from distflow.observe.writing.timing import Waits
from distflow.rollout.engine import RolloutEngine, WeightReceipt
from distflow.runtime import fault_injection
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.weight_sync.bucket_files import SentBucket, Spoiled, hash_of, pack
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive
from distflow.scheduling.group_states import Version

KEPT_FREE_BYTES = 2**31
"""Memory of a device that new weights leave to the engine, which computes meanwhile."""


def _until_loaded(tensor: Tensor) -> Tensor:
    """The received tensor until its version is loaded: where it is, or on the host if its device
    becomes full."""
    is_full = tensor.device.type != "cpu" and free_bytes(tensor.device) < KEPT_FREE_BYTES
    return tensor.cpu() if is_full else tensor


class WeightReceiver:
    """A `Receive` that passes versions to the engine on its own thread.

    A receipt's hashes are those that the engine reports afterwards, whatever its own receipt says;
    `check_receipt` compares them with the trainer's. Raises TrustError if the engine serves another
    version than its receipt names.
    """

    def __init__(self, engine: RolloutEngine, session: RolloutServices, waits: Waits) -> None:
        self._engine = engine
        self._session = session
        self._waits = waits

    def __call__(self, version: Version, weights: Bucket | None) -> WeightReceipt:
        return self._session.call(self._load(version, weights))

    def start(
        self, version: Version, weights: Iterable[tuple[str, Tensor]]
    ) -> "Future[WeightReceipt]":
        return self._session.start(self._load(version, weights))

    async def _load(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        engine = self._engine
        with self._waits("engine", f"weights of step {version.step}", on="training"):
            receipt = await engine.load_weights(version, weights)
            hashes = await engine.hashes()

        if engine.version != receipt.version:
            raise TrustError(
                f"the rollout engine's receipt is for {receipt.version}, but it serves "
                f"{engine.version}: weights that were not loaded"
            )

        return replace(receipt, hashes=hashes)


class IncomingWeights:
    """The `EnginePort` of a worker that does not train. A version is collected beside the weights
    of its engine, which uses the old ones until all new ones have arrived; an incomplete version is
    discarded when the next begins. `receive` and `load` are called from outside, one after
    another."""

    def __init__(self) -> None:
        self.ready: Future[None] = Future()  # set after the first version is loaded
        self._receive: Receive | None = None
        self._attached = threading.Event()
        self._version: Version | None = None
        self._buckets: list[list[tuple[str, Tensor]]] = []

    def attach(self, receive: Receive) -> Detach:
        self._receive = receive
        self._attached.set()
        return lambda: None

    def receive(self, version: Version, number: int, bucket: SentBucket, own_hash: str) -> None:
        """Receive a bucket of a version. number: from 0; the first bucket begins the version.
        own_hash: of the bucket. Raises Spoiled if it differs from what was sent, ValueError if an
        earlier one is missing, UserError if it is not visible from here."""
        fault_injection.reach("weights.take")
        if number == 0:
            self._version = version
            self._buckets = []

        if (version, number) != (self._version, len(self._buckets)):
            raise ValueError(
                f"bucket {number} of {version} came after {len(self._buckets)} buckets of "
                f"{self._version}"
            )

        buckets = self._buckets  # whatever version begins meanwhile
        weights = bucket.get()
        arrived = pack(weights, device=None)
        on_host = (values.numpy().data for *_, values in arrived if values.device.type == "cpu")
        fault_injection.reach("weights.arrived", next(on_host, None))
        if hash_of(arrived) != own_hash:
            raise Spoiled(f"the hash of bucket {number} differs from that of the sent bytes")
        buckets.append([(name, _until_loaded(tensor)) for name, tensor in weights])

    def load(self, version: Version, num_buckets: int | None) -> WeightReceipt:
        """Load the received version into the engine; num_buckets None: only renumber its weights.
        Waits until the worker has started. Raises ValueError if buckets are missing, and what
        `Receive` raises."""
        fault_injection.reach("weights.serve")
        buckets = self._buckets
        self._buckets = []

        if num_buckets and (version, num_buckets) != (self._version, len(buckets)):
            raise ValueError(
                f"{len(buckets)} buckets of {self._version} came, not {num_buckets} of {version}"
            )

        self._attached.wait()
        assert self._receive is not None, "it is attached"

        weights = None
        if num_buckets is not None:
            weights = list(chain.from_iterable(buckets))

        receipt = self._receive(version, weights)
        if not self.ready.done():
            self.ready.set_result(None)
        return receipt
