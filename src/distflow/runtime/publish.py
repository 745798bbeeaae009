"""Publishes the trainer's weights in buckets, and compares the canary's answers where its turn has come."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor, nn

from distflow.flow.ticket import Version
from distflow.models.magnitude import magnitudes, unsound
from distflow.rollout.engine import Receipt, RolloutEngine
from distflow.rollout.receipts import stripe_hashes
from distflow.runtime import faults
from distflow.runtime.checks import TrustError
from distflow.runtime.checks.canary import Canary
from distflow.runtime.checks.sent import check_sent
from distflow.runtime.ports.weights import Bucket, WeightPort
from distflow.runtime.session import Session
from distflow.training.engine import TrainEngine

BUCKET_BYTES = 2**28


class Publisher:
    """Pushes versions of one train engine's weights.

    sends: False where engines need no tensor, only to know of the version (an adapter that is applied unmerged on
    shared storage). canary: None where no rollout engine is on this worker.
    """

    def __init__(
        self,
        actor: TrainEngine,
        port: WeightPort,
        dtype: torch.dtype,
        *,
        sends: bool,
        canary: Canary | None,
        session: Session,
    ) -> None:
        self._actor, self._port, self._dtype, self._sends = actor, port, dtype, sends
        self._canary, self._session = canary, session
        self._last: dict[str, str] = {}  # hashes of what was pushed last
        self._version: Version | None = None

    def publish_changed(self, version: Version, updated: bool) -> tuple[bool, dict[str, float]]:
        """As `publish`, but weights that are those of the last version get its number, and nothing is pushed.

        updated: whether an optimizer step was taken since; a node may change weights without one. Returns whether they
        were pushed as well.
        """
        if self._sends and not updated:
            now = stripe_hashes(self._weights())
            if now == self._last:
                self._follow(version)
                self._port.alias(version, now)
                return False, {}
        return True, self.publish(version)

    def publish(self, version: Version, at_start: bool = False) -> dict[str, float]:
        """Push a version and wait until every engine serves it; the metrics of the canary's comparison, if one was due.

        at_start: the first of this process, before any step. Raises TrustError where weights are garbage, did not
        arrive whole, or the canary's answers mean other weights.
        """
        self._follow(version)
        self._push(version)
        if self._canary is None or not self._canary.is_due(at_start):
            return {}
        return self._canary.compare(self._session.call(self._canary.answer()), at_start)

    def push_again(self) -> None:
        """The version that was published last once more, for engines that have come since. The weights are still
        its."""
        assert self._version is not None, "a first version is published before"
        self._push(self._version)

    @property
    def hashes(self) -> Mapping[str, str]:
        """Of the weights that were pushed last, by name."""
        return self._last

    def _push(self, version: Version) -> None:
        faults.reach("weights.begin")
        self._port.begin(version)
        self._last = {}
        for bucket in buckets(self._weights(), BUCKET_BYTES):
            self._put(version, bucket)
            del bucket  # before the next is gathered
            faults.reach("weights.put")
        self._port.commit(self._last)
        faults.reach("weights.sent")

    def _put(self, version: Version, bucket: Bucket) -> None:
        model = getattr(self._actor, "model", None)
        _refuse_garbage(version, bucket)
        if isinstance(model, nn.Module):
            check_sent(bucket, model, version.step)
        self._last |= stripe_hashes(bucket)
        self._port.put(bucket)

    def _follow(self, version: Version) -> None:
        if self._version is not None and version <= self._version:
            raise TrustError(f"weights of {version} are to be published behind those of {self._version}")
        self._version = version

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """In the engine's dtype: the trainer's own are float32."""
        weights = self._actor.weights() if self._sends else iter(())
        return ((name, tensor.to(self._dtype)) for name, tensor in weights)


class Receiver:
    """Hands versions to the engine on its own thread.

    A receipt's hashes are those that the engine gives when asked afterwards, whatever it says that it took. Raises
    TrustError where it serves another version than the receipt says, or holds other weights.
    """

    def __init__(self, engine: RolloutEngine, session: Session) -> None:
        self._engine, self._session = engine, session

    def __call__(self, version: Version, weights: Bucket | None) -> Receipt:
        """See `Receive`."""
        return self._session.call(self._load(version, weights))

    def start(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> "Future[Receipt]":
        """See `Receive`."""
        return self._session.start(self._load(version, weights))

    async def _load(self, version: Version, weights: Iterable[tuple[str, Tensor]] | None) -> Receipt:
        engine = self._engine
        receipt = await engine.load_weights(version, weights)
        held = await engine.hashes()
        claimed = {name: held.get(name) for name in receipt.hashes}
        if engine.version != receipt.version or claimed != receipt.hashes:
            raise TrustError(
                f"the rollout engine's receipt is for {receipt.version}, but it serves {engine.version}, and "
                f"{sum(held.get(name) != own for name, own in receipt.hashes.items())} of its tensors are not those "
                "that the receipt names: weights that were not taken, or a version that is counted ahead of them"
            )
        return replace(receipt, hashes=held)


def _refuse_garbage(version: Version, bucket: Bucket) -> None:
    wrong = unsound(magnitudes(bucket))
    if wrong:
        raise TrustError(
            f"the weights of version {version.step} must not be served: {wrong[0]}, {len(wrong)} tensors or more. "
            "Something changed them between the last update, behind which they were sound, and now"
        )


def buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Runs of neighbouring tensors of at most `max_bytes` together; a larger one is a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            full, bucket, num_bytes = bucket, [], 0
            yield full
            del full
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
