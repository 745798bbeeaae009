"""Sends the trainer's weights in buckets when a sync is due, and runs the canary when that is due."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.models.weight_checks import magnitudes, unsound
from distflow.rollout.engine import Receipt, RolloutEngine
from distflow.rollout.weights import stripe_hashes
from distflow.runtime import fault_injection
from distflow.runtime.audit_protocol import Updates
from distflow.runtime.offload import Offload
from distflow.runtime.rollout_services import Session
from distflow.runtime.weight_sync.protocol import Bucket, WeightPort
from distflow.runtime.weight_sync.receipts import check_all_synced, check_replicas, check_sent
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.groups import Version
from distflow.training.engine import TrainEngine

BUCKET_BYTES = 2**28


class Canary(Protocol):
    """Compares the engine's log-probs on fixed prompts with the trainer's, after some of the syncs."""

    def is_due(self, at_start: bool) -> bool:
        """Call once a sync."""
        ...

    async def generate_responses(self) -> Batch:
        """The engine's responses to the fixed prompts."""
        ...

    def compare(self, responses: Batch, at_start: bool) -> dict[str, float]:
        """Raises TrustError if they imply other weights than the trainer's."""
        ...


class WeightSender:
    """Sends versions of one train engine's weights.

    sends: False if engines need no tensors, only the version (an adapter that is applied unmerged on shared storage).
    canary: None if no rollout engine is on this worker.
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
        self._last: dict[str, str] = {}  # hashes of the weights that were sent last
        self._version: Version | None = None

    def sync_changed(self, version: Version, updated: bool) -> tuple[bool, dict[str, float]]:
        """As `sync`, but unchanged weights only get the new version number, and nothing is sent.

        updated: whether an optimizer step was taken since; a node may change weights without one. Also returns whether
        they were sent.
        """
        if self._sends and not updated:
            now = stripe_hashes(self._weights())
            if now == self._last:
                self._advance_to(version)
                self._port.renumber(version, now)
                return False, {}
        return True, self.sync(version)

    def sync(self, version: Version, at_start: bool = False) -> dict[str, float]:
        """Send a version and wait until every engine has it; returns the metrics of the canary, if it was due.

        at_start: the first of this process, before any step. Raises TrustError if weights are garbage, did not arrive
        complete, or the canary's responses imply other weights.
        """
        self._advance_to(version)
        self._push(version)
        if self._canary is None or not self._canary.is_due(at_start):
            return {}
        return self._canary.compare(self._session.call(self._canary.generate_responses()), at_start)

    def push_again(self) -> None:
        """Send the last version again, for new engines. The weights are unchanged since."""
        assert self._version is not None, "a first version was sent before"
        self._push(self._version)

    @property
    def hashes(self) -> Mapping[str, str]:
        """Of the weights that were sent last, by name."""
        return self._last

    def _push(self, version: Version) -> None:
        fault_injection.reach("weights.begin")
        self._port.begin(version)
        self._last = {}
        for bucket in buckets(self._weights(), BUCKET_BYTES):
            self._put(version, bucket)
            del bucket  # before the next is gathered
            fault_injection.reach("weights.put")
        self._port.commit(self._last)
        fault_injection.reach("weights.sent")

    def _put(self, version: Version, bucket: Bucket) -> None:
        model = getattr(self._actor, "model", None)
        _refuse_garbage(version, bucket)
        if isinstance(model, nn.Module):
            check_sent(bucket, model, version.step)
        self._last |= stripe_hashes(bucket)
        self._port.put(bucket)

    def _advance_to(self, version: Version) -> None:
        if self._version is not None and version <= self._version:
            raise TrustError(f"weight version went backwards: {version} was to be sent after {self._version}")
        self._version = version

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """In the engine's dtype: the trainer's own are float32."""
        weights = self._actor.weights() if self._sends else iter(())
        return ((name, tensor.to(self._dtype)) for name, tensor in weights)


class WeightReceiver:
    """Passes versions to the engine on its own thread.

    A receipt's hashes are those that the engine reports afterwards, whatever its own receipt says. Raises TrustError if
    it has another version than the receipt says, or other weights.
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
                "that the receipt names: weights that were not loaded, or a version number without its weights"
            )
        return replace(receipt, hashes=held)


def _refuse_garbage(version: Version, bucket: Bucket) -> None:
    wrong = unsound(magnitudes(bucket))
    if wrong:
        raise TrustError(
            f"the weights of version {version.step} must not be served: {wrong[0]}, {len(wrong)} tensors or more. "
            "Something changed them since the last update, after which they were sound"
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


class WeightSync:
    """Sends the weights of a worker when a sync is due. It sends none if it trains none, or no worker generates."""

    def __init__(
        self,
        inputs: WorkerInputs,
        services: Session,
        updates: Updates,
        offload: Offload,
        canary: Canary | None,
    ) -> None:
        """canary: None if no rollout engine is on this worker."""
        spec, ports, version, resources = inputs.spec, inputs.ports, inputs.version, services.resources
        self._ports, self._recorder, self._version = ports, inputs.recorder, version
        self._updates, self._offload, self._engine = updates, offload, resources.rollout
        self._sender: WeightSender | None = None
        if resources.actor is not None and spec.plan.generates:
            sends, dtype = spec.sends_weights, spec.weight_dtype
            self._sender = WeightSender(
                resources.actor, ports.weights, dtype, sends=sends, canary=canary, session=services
            )
        self.step = version.step  # of the weights that were sent last

    def begin(self) -> dict[str, float]:
        """Send the initial weights of this process; returns the canary's metrics."""
        if self._sender is None:
            return {}
        compared = self._sender.sync(self._version, at_start=True)
        self._recorder.serves(self._version)
        return compared

    def send(self, version: Version) -> tuple[bool, dict[str, float]]:
        """Send the weights after a step. Returns whether they had changed, and the canary's metrics."""
        self.step, updated = version.step, self._updates.since_sent()
        if self._sender is None:
            return updated, {}
        self._offload.only(("actor",))
        outcome = self._sender.sync_changed(version, updated)
        check_all_synced(self._oldest_version(), version)
        check_replicas(self._sender.hashes, version.step, self._ports.collective)
        self._recorder.serves(version)
        return outcome

    def send_to_new_workers(self, step: int) -> None:
        """Between two steps, `step` being the next. The weights are those that were sent last, or newer ones, which are
        then sent to all."""
        if self._sender is None:
            return
        self._offload.only(("actor",))
        sent = self.step < step and self.send(Version(self._version.restart, step))[0]
        if not sent:
            self._sender.push_again()

    def _oldest_version(self) -> Version | None:
        """The oldest version of the engines to which this rank sends; None if it has none."""
        own = [self._engine.version] if self._engine is not None else []
        confirmed = self._ports.weights.confirmed
        return min([*own, *([confirmed] if confirmed is not None else [])], default=None)
