"""Checks of the weight sync: ranks that train the same model have the same weights, the sent weights are the trainer's
current ones with adapters merged, and engines have the version that was sent."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distflow.errors import TrustError
from distflow.models.model_parts import unwrapped
from distflow.models.shards import at_places, whole
from distflow.rollout.weights import striped_places
from distflow.runtime.weight_sync.protocol import Bucket
from distflow.scheduling.groups import Version
from distflow.training.collective import Collective

FLIPPED = 0.01
"""Share of a merged tensor's elements that rounding may move to a neighbouring value."""


def check_replicas(hashes: Mapping[str, str], step: int, ranks: Collective) -> None:
    """hashes: of the weights that this rank has sent, by name. Raises TrustError naming tensors, on every rank."""
    if ranks.size == 1:
        return
    text = json.dumps(sorted(hashes.items()))
    digest = float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little"))
    if ranks.max(digest) == -ranks.max(-digest):
        return
    everyone = ranks.gather(dict(hashes))
    odd = [name for name in hashes if len({own.get(name) for own in everyone}) > 1]
    raise TrustError(
        f"the ranks that train together no longer have the same weights after step {step}: {', '.join(odd[:5])}, "
        f"{len(odd)} tensors in all. A node or callback changed them on some rank, or a device computes wrongly"
    )


def check_sent(bucket: Bucket, model: nn.Module, step: int) -> None:
    """Compare a stripe of each tensor with the module's, computed element by element; of a sharded one the elements on
    this rank.

    Raises TrustError naming the tensors that differ: left from an older version, without their adapter, or mixed up.
    The engine rejects names that the module does not have.
    """
    causal = unwrapped(model)
    own = dict(causal.named_parameters(remove_duplicate=False))
    different = [name for name, tensor in bucket if not _is_own(name, tensor, causal, own)]
    if different:
        raise TrustError(
            f"the weights of version {step} are not the trainer's: {', '.join(different[:5])} "
            f"({len(different)} tensors) differ from the trainer's current ones: an older copy, an adapter "
            "that was not merged or is scaled otherwise, or another tensor's values"
        )


def check_all_synced(oldest: Version | None, version: Version) -> None:
    """After the sync of `version` all engines have it, in whatever process. oldest: the oldest version of any of them,
    None if there are none. Raises TrustError if it is another: at staleness 0 that engine would wait for the version,
    and the trainer for the engine, for ever."""
    if oldest not in (None, version):
        raise TrustError(f"version {version.step} was sent, but an engine has {oldest.step}: weights did not reach it")


def _is_own(name: str, tensor: Tensor, causal: nn.Module, own: dict[str, nn.Parameter]) -> bool:
    owner, _, leaf = name.rpartition(".")
    base = own.get(f"{owner}.base_layer.{leaf}")
    parameter = own.get(name) if base is None else base
    if parameter is None:
        return True
    if parameter.shape != tensor.shape:
        return False
    stripe = striped_places(tensor.numel())
    held, own_values = at_places(parameter, stripe)
    places, expected = stripe[held], own_values.cpu()
    sent = tensor.detach().reshape(-1)[places.to(tensor.device)].cpu()
    if base is None or leaf != "weight":
        return torch.equal(sent, expected.to(sent.dtype))
    delta = _delta(causal.get_submodule(owner), places)
    merged = (expected + delta.to(expected.dtype)).to(sent.dtype).double()
    rounding = 16 * torch.finfo(torch.float32).eps * (expected.double().abs() + delta.abs())
    return float(((sent.double() - merged).abs() > rounding).double().sum()) <= FLIPPED * len(stripe)


def _delta(layer: nn.Module, places: Tensor) -> Tensor:
    """What the layer's adapters add to its weight `(out, in)` at flat places: the sum of scale · B A."""
    total = torch.zeros(len(places), dtype=torch.float64)
    for name in layer.active_adapters:  # type: ignore[union-attr]  # of peft's layers, as what follows
        down, up = (whole(getattr(layer, part)[name].weight.detach()).cpu().double() for part in ("lora_A", "lora_B"))
        rows, columns = places // down.shape[1], places % down.shape[1]
        total += layer.scaling[name] * (up[rows] * down[:, columns].T).sum(-1)  # type: ignore[index]
    return total
