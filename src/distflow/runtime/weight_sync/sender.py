"""Sends the trainer's weights in buckets when a sync is due, and runs the canary when one is due.

Each sync checks that ranks training the same model have the same weights, that the sent weights are
the trainer's current ones with adapters merged, and that engines have the version that was sent.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distflow.data.batch import Batch
from distflow.device_transfer import send, to_host
from distflow.errors import TrustError
from distflow.models.lora import unwrapped
from distflow.models.sharding import at_places, whole
from distflow.models.weight_soundness import magnitudes, unsound
from distflow.rollout.engine_weights import stripe_hashes, striped_places
from distflow.runtime import fault_injection
from distflow.runtime.checks_protocol import Updates
from distflow.runtime.offload import Offload
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.weight_sync.protocol import Bucket, WeightPort
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.group_states import Version
from distflow.training.engine import Collective, TrainEngine

BUCKET_BYTES = 2**28
FLIPPED = 0.01
"""The share of a merged tensor's elements that rounding may move to a neighbouring value."""


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
            _refuse_garbage(version, bucket)
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


class WeightSync:
    """Sends the weights of a worker when a sync is due. It sends none if it trains none, or no
    worker generates."""

    def __init__(
        self,
        inputs: WorkerInputs,
        services: RolloutServices,
        updates: Updates,
        offload: Offload,
        canary: Canary | None,
    ) -> None:
        """canary: None if this worker has no rollout engine."""
        spec = inputs.spec
        ports = inputs.ports
        version = inputs.version
        resources = services.resources
        self._ports = ports
        self._recorder = inputs.recorder
        self._version = version
        self._updates = updates
        self._offload = offload
        self._engine = resources.rollout
        self._sender: WeightSender | None = None
        self._frees = spec.frees_engine
        if resources.actor is not None and spec.plan.generates:
            assert ports.weights is not None, "a worker that trains sends weights"
            self._sender = WeightSender(
                resources.actor,
                ports.weights,
                spec.weight_dtype,
                sends=spec.sends_weights,
                canary=canary,
                session=services,
            )
        self.step = version.step  # step of the weights sent last

    def begin(self) -> dict[str, float]:
        """Send the initial weights of this process; returns the canary's metrics."""
        if self._sender is None:
            return {}
        return self._sender.sync(self._version, at_start=True)

    def send(self, version: Version) -> tuple[bool, dict[str, float]]:
        """Send the weights after a step. Returns whether they had changed, and the canary's
        metrics."""
        self.step = version.step
        updated = self._updates.since_sent()
        if self._sender is None:
            return updated, {}
        self._offload.only(("actor",))
        # released weights must be sent again
        outcome = self._sender.sync_changed(version, updated or self._frees)
        self._check_all_synced(version, self._sender.port.confirmed)
        check_replicas(self._sender.hashes, version.step, self._ports.collective)
        return outcome

    def send_to_new_workers(self, step: int) -> None:
        """Send weights to new workers between two steps; `step` is the next. If the weights are
        newer than those sent last, all engines get them."""
        if self._sender is None:
            return
        self._offload.only(("actor",))
        is_newer = self.step < step and self.send(Version(self._version.restart, step))[0]
        if not is_newer:
            self._sender.push_again()

    def _check_all_synced(self, version: Version, confirmed: Version | None) -> None:
        """Check that all engines to which this rank sends have the version. confirmed: by those of
        other processes. Raises TrustError if one has another: at staleness 0 that engine and the
        trainer would wait for each other forever."""
        own = self._engine.version if self._engine is not None else None
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


def check_replicas(hashes: Mapping[str, str], step: int, ranks: Collective) -> None:
    """hashes: of the weights that this rank has sent, by name. Raises TrustError with the tensors'
    names, on every rank."""
    if ranks.size == 1:
        return
    fingerprint = hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()
    if len(set(ranks.gather(fingerprint))) == 1:
        return
    everyone = ranks.gather(dict(hashes))
    odd = [name for name in hashes if len({own.get(name) for own in everyone}) > 1]
    raise TrustError(
        f"the ranks that train together no longer have the same weights after step {step}: "
        f"{', '.join(odd[:5])}, "
        f"{len(odd)} tensors in all. A node or callback changed them on some rank, or a device "
        "computes incorrectly"
    )


def check_sent(bucket: Bucket, model: nn.Module, step: int, merged: bool = True) -> None:
    """Compare a stripe of each copied tensor with the module's, element by element; for sharded
    ones, the elements on this rank. Of one that is the module's own storage there is nothing to
    compare. merged: whether adapters are in the weights below them.

    Raises TrustError with the names of differing tensors: from an older version, without their
    adapter, or mixed up. The engine rejects names that the module does not have.
    """
    causal = unwrapped(model)
    parameters = dict(causal.named_parameters(remove_duplicate=False))
    different: list[str] = []
    alike: list[tuple[str, Tensor]] = []
    stripes: list[_Stripe] = []
    for name, tensor in bucket:
        own = _own(name, parameters)
        if own is None or _is_storage_of(own, tensor):
            continue
        if own.shape != tensor.shape:
            different.append(name)
            continue
        alike.append((name, tensor))
        stripes.append(_held_stripe(tensor, own))
    read = to_host([values for _, *both in stripes for values in both])
    for number, (name, tensor) in enumerate(alike):
        sent = read[2 * number]
        expected = read[2 * number + 1]
        places = stripes[number][0]
        num_flipped = _count_flipped(name, places, sent, expected, causal, merged)
        if num_flipped > FLIPPED * len(striped_places(tensor.numel())):
            different.append(name)
    if different:
        raise TrustError(
            f"the weights of version {step} are not the trainer's: {', '.join(different[:5])} "
            f"({len(different)} tensors) differ from the trainer's current ones: an older copy, an "
            "adapter that was not merged or is scaled otherwise, or another tensor's values"
        )


def _refuse_garbage(version: Version, bucket: Bucket) -> None:
    wrong = unsound(magnitudes(bucket))
    if wrong:
        raise TrustError(
            f"the weights of version {version.step} must not be used: {wrong[0]}, {len(wrong)} "
            "tensors or more. "
            "They were changed since the last update, after which they were valid"
        )


def _own(name: str, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """The module's parameter that a sent tensor comes from; for an adapted layer, the base's."""
    owner, _, leaf = name.rpartition(".")
    return parameters.get(f"{owner}.base_layer.{leaf}", parameters.get(name))


def _is_storage_of(parameter: nn.Parameter, tensor: Tensor) -> bool:
    """Whether the tensor is the parameter, and no copy of it."""
    if isinstance(parameter, DTensor) or parameter.shape != tensor.shape:
        return False
    return parameter.dtype == tensor.dtype and parameter.data_ptr() == tensor.data_ptr()


_Stripe = tuple[Tensor, Tensor, Tensor]


def _held_stripe(tensor: Tensor, parameter: nn.Parameter) -> _Stripe:
    """The flat positions of a stripe that this rank holds, with the sent values there and its
    own."""
    stripe = striped_places(tensor.numel())
    held, own_values = at_places(parameter, stripe)
    places = stripe[held]
    return places, tensor.detach().reshape(-1)[send(places, tensor.device)], own_values


def _count_flipped(
    name: str, places: Tensor, sent: Tensor, expected: Tensor, causal: nn.Module, merged: bool
) -> float:
    """The number of sent values that differ from the module's: for a merged layer beyond rounding;
    for any other layer, infinity if one does. All tensors are on the host."""
    owner, _, leaf = name.rpartition(".")
    layer = causal.get_submodule(owner)
    if leaf != "weight" or not merged or not hasattr(layer, "base_layer"):
        return 0.0 if torch.equal(sent, expected.to(sent.dtype)) else math.inf
    delta = _delta(layer, places)
    sum_of_both = (expected + delta.to(expected.dtype)).to(sent.dtype).double()
    rounding = 16 * torch.finfo(torch.float32).eps * (expected.double().abs() + delta.abs())
    return float(((sent.double() - sum_of_both).abs() > rounding).double().sum())


def _delta(layer: nn.Module, places: Tensor) -> Tensor:
    """What the layer's adapters add to its weight `(out, in)` at flat positions: the sum of scale ·
    B A."""
    total = torch.zeros(len(places), dtype=torch.float64)
    # of peft's layers, as what follows
    for name in layer.active_adapters:  # type: ignore[union-attr]
        down, up = (
            whole(getattr(layer, part)[name].weight.detach()).cpu().double()
            for part in ("lora_A", "lora_B")
        )
        rows = places // down.shape[1]
        columns = places % down.shape[1]
        total += layer.scaling[name] * (up[rows] * down[:, columns].T).sum(-1)  # type: ignore[index]
    return total
