"""Sends the trainer's weights in buckets when a sync is due, and runs the canary when one is due.

Each sync checks that ranks training the same model have the same weights, that the sent weights are
the trainer's current ones with adapters merged, and that engines have the version that was sent.
"""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime import fault_injection
from distflow.runtime.checks_protocol import Updates
from distflow.runtime.offload import Offload
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.weight_sync.protocol import Bucket, WeightPort
from distflow.runtime.weight_sync.sent_weights import check_replicas, check_sent, check_sound
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.group_states import Version
from distflow.training.engine import TrainEngine

BUCKET_BYTES = 2**28


class Canary(Protocol):
    """Compares the engine's log-probs on fixed prompts with the trainer's, after some syncs."""

    def is_due(self, at_start: bool) -> bool:
        """Whether the canary runs after this sync; call once per sync."""

    async def generate_responses(self) -> Batch:
        """The engine's responses to the fixed prompts."""

    def compare(self, responses: Batch, at_start: bool) -> dict[str, float]:
        """Metrics of the comparison. Raises TrustError if the responses imply weights other than
        the trainer's."""


@dataclass
class WeightSender:
    """Sends versions of one train engine's weights."""

    actor: TrainEngine
    port: WeightPort
    dtype: torch.dtype
    _: KW_ONLY
    sends: bool
    """False if engines need only the version, no tensors: an adapter applied unmerged on shared
    storage."""
    canary: Canary | None
    """None if this worker has no rollout engine."""
    session: RolloutServices
    hashes: dict[str, str] = field(default_factory=dict, init=False)
    """Of the weights sent last, by name."""
    _version: Version | None = field(default=None, init=False)

    def sync_changed(self, version: Version, updated: bool) -> tuple[bool, dict[str, float]]:
        """As `sync`, but unchanged weights only get the new version number, and nothing is sent.

        updated: whether an optimizer step was taken since; a node may change weights without one.
        Also returns whether weights were sent.
        """
        if self.sends and not updated:
            now = stripe_hashes(self._weights())
            if now == self.hashes:
                self._advance_to(version)
                self.port.renumber(version, now)
                return False, {}

        return True, self.sync(version)

    def sync(self, version: Version, at_start: bool = False) -> dict[str, float]:
        """Send a version and wait until every engine has it; returns the metrics of the canary, if
        it was due.

        at_start: the first of this process, before any step. Raises TrustError if weights are
        non-finite or exploding, arrived incomplete, or the canary's responses imply other weights.
        """
        self._advance_to(version)
        self._push(version)
        if self.canary is None or not self.canary.is_due(at_start):
            return {}
        return self.canary.compare(self.session.call(self.canary.generate_responses()), at_start)

    def push_again(self) -> None:
        """Send the last version again, for new engines. The weights have not changed since."""
        assert self._version is not None, "a first version was sent before"
        self._push(self._version)

    def _push(self, version: Version) -> None:
        fault_injection.reach("weights.begin")
        self.port.begin(version)
        self.hashes = {}
        model = getattr(self.actor, "model", None)

        for bucket in buckets(self._weights(), BUCKET_BYTES):
            check_sound(bucket, version)
            if isinstance(model, nn.Module):
                check_sent(bucket, model, version.step, getattr(self.actor, "merge_adapter", True))
            self.hashes |= stripe_hashes(bucket)
            self.port.put(bucket)
            del bucket  # before the next one is gathered
            fault_injection.reach("weights.put")

        self.port.commit(self.hashes)
        fault_injection.reach("weights.sent")

    def _advance_to(self, version: Version) -> None:
        if self._version is not None and version <= self._version:
            raise TrustError(
                f"weight version went backwards: {version} was to be sent after {self._version}"
            )
        self._version = version

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in the engine's dtype; the trainer's are float32."""
        weights = self.actor.weights() if self.sends else iter(())
        return ((name, tensor.to(self.dtype)) for name, tensor in weights)


@dataclass(eq=False, repr=False)
class WeightSync:
    """Sends the weights of a worker when a sync is due. It sends none if it trains none, or no
    worker generates."""

    inputs: WorkerInputs
    services: RolloutServices
    updates: Updates
    offload: Offload
    canary: Canary | None
    """None if this worker has no rollout engine."""
    step: int = field(init=False)
    """Step of the weights sent last."""

    def __post_init__(self) -> None:
        spec = self.inputs.spec
        weights = self.inputs.ports.weights
        actor = self.services.resources.actor
        self.step = self.inputs.version.step
        self._sender: WeightSender | None = None

        if actor is not None and spec.plan.generates:
            assert weights is not None, "a worker that trains sends weights"
            self._sender = WeightSender(
                actor,
                weights,
                spec.weight_dtype,
                sends=spec.sends_weights,
                canary=self.canary,
                session=self.services,
            )

    def begin(self) -> dict[str, float]:
        """Send the initial weights of this process; returns the canary's metrics."""
        if self._sender is None:
            return {}
        return self._sender.sync(self.inputs.version, at_start=True)

    def send(self, version: Version) -> tuple[bool, dict[str, float]]:
        """Send the weights after a step. Returns whether they had changed, and the canary's
        metrics."""
        self.step = version.step
        updated = self.updates.since_sent()
        sender = self._sender
        if sender is None:
            return updated, {}

        self.offload.only(("actor",))

        # released weights must be sent again
        outcome = sender.sync_changed(version, updated or self.inputs.spec.frees_engine)
        self._check_all_synced(version, sender.port.confirmed)
        check_replicas(sender.hashes, version.step, self.inputs.ports.collective)

        return outcome

    def send_to_new_workers(self, step: int) -> None:
        """Send weights to new workers between two steps; `step` is the next. If the weights are
        newer than those sent last, all engines get them."""
        if self._sender is None:
            return

        self.offload.only(("actor",))
        version = Version(self.inputs.version.restart, step)
        is_newer = self.step < step and self.send(version)[0]
        if not is_newer:
            self._sender.push_again()

    def _check_all_synced(self, version: Version, confirmed: Version | None) -> None:
        """Check that all engines to which this rank sends have the version. confirmed: by those of
        other processes. Raises TrustError if one has another: at staleness 0 that engine and the
        trainer would wait for each other forever."""
        engine = self.services.resources.rollout
        own = None if engine is None else engine.version
        for has in (own, confirmed):
            if has is not None and has != version:
                raise TrustError(
                    f"version {version.step} was sent, but an engine has {has.step}: weights did "
                    "not reach it"
                )


def buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Runs of neighbouring tensors of at most `max_bytes` in total; a larger tensor is a bucket by
    itself."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            full = bucket
            bucket = []
            num_bytes = 0
            yield full
            del full

        bucket.append((name, tensor))
        num_bytes += tensor.nbytes

    if bucket:
        yield bucket
