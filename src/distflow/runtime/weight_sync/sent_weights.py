"""Checks of the weights that a trainer sends: they are sound, its current ones, and the same on all
ranks that train them."""

import hashlib
import json
import math
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distflow.device_transfer import send, to_host
from distflow.errors import TrustError
from distflow.models.lora import unwrapped
from distflow.models.sharding import at_places, whole
from distflow.models.weight_soundness import magnitudes, unsound
from distflow.rollout.engine_weights import striped_places
from distflow.runtime.weight_sync.protocol import Bucket
from distflow.scheduling.group_states import Version
from distflow.training.engine import Collective

FLIPPED = 0.01
"""The share of a merged tensor's elements that rounding may move to a neighbouring value."""


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
        f"{', '.join(odd[:5])}, {len(odd)} tensors in all. A node or callback changed them on some "
        "rank, or a device computes incorrectly"
    )


def check_sound(bucket: Bucket, version: Version) -> None:
    """Raises TrustError if weights are non-finite or exploding."""
    wrong = unsound(magnitudes(bucket))
    if wrong:
        raise TrustError(
            f"the weights of version {version.step} must not be used: {wrong[0]}, {len(wrong)} "
            "tensors or more. They were changed since the last update, after which they were valid"
        )


class _Stripe(NamedTuple):
    """The part of a sent tensor that is compared."""

    name: str
    size: int
    """Of the stripe over all ranks."""
    places: Tensor
    """Its flat positions that this rank holds."""
    sent: Tensor
    """The sent values there."""
    expected: Tensor
    """The module's own."""


def check_sent(bucket: Bucket, model: nn.Module, step: int, merged: bool = True) -> None:
    """Compare a stripe of each copied tensor with the module's, element by element; for sharded
    ones, the elements on this rank. Of one that is the module's own storage there is nothing to
    compare. merged: whether adapters are in the weights below them.

    Raises TrustError with the names of differing tensors: from an older version, without their
    adapter, or mixed up. The engine rejects names that the module does not have.
    """
    causal = unwrapped(model)
    parameters = dict(causal.named_parameters(remove_duplicate=False))

    different = list[str]()
    stripes = list[_Stripe]()
    for name, tensor in bucket:
        own = _own(name, parameters)
        if own is None or _is_storage_of(own, tensor):
            continue

        if own.shape != tensor.shape:
            different.append(name)
        else:
            stripes.append(_held_stripe(name, tensor, own))

    pairs = ((each.sent, each.expected) for each in stripes)
    on_host = iter(to_host(list(chain.from_iterable(pairs))))
    for stripe in stripes:
        both = stripe._replace(sent=next(on_host), expected=next(on_host))
        if _count_flipped(both, causal, merged) > FLIPPED * stripe.size:
            different.append(stripe.name)

    if different:
        raise TrustError(
            f"the weights of version {step} are not the trainer's: {', '.join(different[:5])} "
            f"({len(different)} tensors) differ from the trainer's current ones: an older copy, an "
            "adapter that was not merged or is scaled otherwise, or another tensor's values"
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


def _held_stripe(name: str, tensor: Tensor, parameter: nn.Parameter) -> _Stripe:
    stripe = striped_places(tensor.numel())
    held, own_values = at_places(parameter, stripe)
    places = stripe[held]
    sent = tensor.detach().reshape(-1)[send(places, tensor.device)]
    return _Stripe(name, len(stripe), places, sent, own_values)


def _count_flipped(stripe: _Stripe, causal: nn.Module, merged: bool) -> float:
    """The number of sent values that differ from the module's: for a merged layer beyond rounding;
    for any other layer, infinity if one does. All tensors are on the host."""
    sent = stripe.sent
    expected = stripe.expected
    owner, _, leaf = stripe.name.rpartition(".")

    layer = causal.get_submodule(owner)
    if leaf != "weight" or not merged or not hasattr(layer, "base_layer"):
        if torch.equal(sent, expected.to(sent.dtype)):
            return 0.0
        return math.inf

    delta = _delta(layer, stripe.places)
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
