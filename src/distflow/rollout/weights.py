"""Loads a trainer's weights into an engine's module: all or nothing, each tensor by its Hugging Face name. Its receipt
has a hash of a stripe of each tensor, computed alike by sender and receiver."""

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distflow.rollout.engine import WeightReceipt
from distflow.scheduling.groups import Version

STRIPE_LENGTH = 1024


def striped_places(numel: int) -> Tensor:
    """Which elements of a tensor of that size are looked at: at most `STRIPE_LENGTH`, evenly spaced.

    The stride is odd, so that it does not stay in a few columns of a matrix whose width is a power of two.
    """
    return torch.arange(0, numel, -(-numel // STRIPE_LENGTH) | 1)


def stripe_hash(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Hash of the elements at `striped_places`, with the shape and the dtype.

    dtype: of the receiver's weights, where the sender keeps another; the stripe is cast before it is hashed.
    """
    dtype = dtype or tensor.dtype
    flat = tensor.detach().reshape(-1)
    sampled = flat[striped_places(flat.numel()).to(flat.device)]
    stripe = torch.empty(sampled.shape, dtype=dtype).copy_(sampled)
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {dtype}".encode(), digest_size=16)
    digest.update(stripe.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stripe_hashes(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """The hash of each named tensor, as in a receipt."""
    return {name: stripe_hash(tensor, dtype) for name, tensor in weights}


class PartialWeightsError(RuntimeError):
    """Weights that came one after another did not fit, and those before are taken: the module is of two versions."""


class EngineWeights:
    """The weights of an engine's module, which are replaced as a whole or not at all."""

    def __init__(self, module: nn.Module, shared: bool) -> None:
        """shared: the module is the trainer's, so nothing is copied."""
        self._module = module
        self._shared = shared
        self._is_whole = True

    def check_whole(self) -> None:
        """Raises RuntimeError after a copy that failed in the middle."""
        if not self._is_whole:
            raise RuntimeError("the rollout engine took a part of its last weights only, and does not use them")

    def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return stripe_hashes(self._module.named_parameters(remove_duplicate=False))

    def load(self, current: Version, version: Version, weights: Iterable[tuple[str, Tensor]] | None) -> WeightReceipt:
        """Take the weights of a version, between two steps; None: those that are there get that version.

        Raises ValueError, with nothing changed, when the version goes back, when names or shapes do not fit, or, on
        shared storage, when a sent tensor is not the module's own.
        """
        if version < current:
            raise ValueError(f"weights of {version} offered to an engine that serves {current}: versions never go back")
        if weights is None:
            return WeightReceipt(version, shared=self._shared, version_only=True)
        if self._shared:
            check_shared(self._module, weights)
            return WeightReceipt(version, shared=True)
        was_whole, self._is_whole = self._is_whole, False
        try:
            hashes = copy_weights(self._module, weights)
        except ValueError:
            self._is_whole = was_whole
            raise
        self._is_whole = True
        return WeightReceipt(version, hashes)


def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Copy every parameter in place, cast to the module's types. Returns the hashes of what the module now holds.

    Tied parameters may be sent under any or all of their names. Raises ValueError, with nothing changed, when a name is
    unknown, missing or doubled, when a shape differs, or when two names of one tensor bring different values: a
    sequence is looked at as a whole first. Other iterables are copied as they come, and raise PartialWeightsError.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    if isinstance(weights, Sequence):
        _check_all(own, weights)
    copied_names: dict[int, list[str]] = {}  # names by parameter
    with torch.no_grad():
        for name, tensor in weights:
            if problem := _problem(own, copied_names, name, tensor):
                raise PartialWeightsError(f"weights taken in part: {problem}")
            own[name].copy_(tensor)
            copied_names.setdefault(id(own[name]), []).append(name)
    if missing := _missing(own, copied_names):
        raise PartialWeightsError(f"weights taken in part: {'; '.join(missing[:8])}")
    return stripe_hashes((name, own[name]) for names in copied_names.values() for name in names)


def _check_all(own: Mapping[str, nn.Parameter], weights: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ValueError."""
    named = dict(weights)
    problems = [f"{name}: sent twice" for name, count in Counter(name for name, _ in weights).items() if count > 1]
    problems += [problem for name, tensor in named.items() if (problem := _unfit(own, name, tensor))]
    for names in _names_by_parameter(own):
        present = [name for name in names if name in named]
        if any(not _same(named[present[0]], named[other]) for other in present[1:]):
            problems.append(f"{' and '.join(present)}: one tensor here, different values sent")
    problems += _missing(own, {id(own[name]) for name in named if name in own})
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"weights not taken, nothing changed: {'; '.join(problems[:8])}{more}")


def _problem(
    own: Mapping[str, nn.Parameter], copied_names: Mapping[int, list[str]], name: str, tensor: Tensor
) -> str | None:
    """Why a tensor cannot follow those that are taken already."""
    if problem := _unfit(own, name, tensor):
        return problem
    others = copied_names.get(id(own[name]), [])
    if name in others:
        return f"{name}: sent twice"
    if others and not torch.equal(own[name], tensor.to(own[name])):
        return f"{' and '.join([*others, name])}: one tensor here, different values sent"
    return None


def _unfit(own: Mapping[str, nn.Parameter], name: str, tensor: Tensor) -> str | None:
    if name not in own:
        return f"{name}: unknown"
    if tensor.shape != own[name].shape:
        return f"{name}: shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
    return None


def _missing(own: Mapping[str, nn.Parameter], present: Container[int]) -> list[str]:
    """present: parameters of which some name came."""
    return [f"{names[0]}: missing" for names in _names_by_parameter(own) if id(own[names[0]]) not in present]


def check_shared(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a sent tensor that is not the module's own storage: it would never be computed with."""
    own = dict(module.named_parameters(remove_duplicate=False))
    foreign = [name for name, tensor in weights if name not in own or tensor.data_ptr() != own[name].data_ptr()]
    if foreign:
        raise ValueError(
            f"the engine shares the trainer's storage, but {len(foreign)} sent tensors lie elsewhere "
            f"({', '.join(foreign[:4])}): send the trainer's own parameters, or give the engine its own copy"
        )


def _names_by_parameter(own: Mapping[str, nn.Parameter]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in own.items():
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)
