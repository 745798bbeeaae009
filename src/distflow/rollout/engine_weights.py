"""Loads a trainer's weights into an engine's module: all or nothing, each tensor by its Hugging
Face name. The receipt has a hash of a stripe of each tensor, which sender and receiver compute the
same way."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distflow.device_transfer import send, to_host
from distflow.rollout.engine import WeightReceipt
from distflow.scheduling.group_states import Version

STRIPE_LENGTH = 1024


def striped_places(numel: int) -> Tensor:
    """The positions of the hashed elements of a tensor of that size: at most `STRIPE_LENGTH`,
    evenly spaced.

    The stride is odd, so that it does not stay in a few columns of a matrix whose width is a power
    of two.
    """
    return torch.arange(0, numel, -(-numel // STRIPE_LENGTH) | 1)


def stripe_hashes(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> dict[str, str]:
    """The hash of each named tensor, as in a receipt: of its elements at `striped_places`, its
    shape and its dtype.

    dtype: of the receiver's weights, if different; stripes are cast before they are hashed. No
    tensor is kept, so they may be gathered one by one.
    """
    shapes = list[tuple[str, tuple[int, ...]]]()
    stripes = list[Tensor]()
    for name, tensor in weights:
        flat = tensor.detach().reshape(-1)
        shapes.append((name, tuple(tensor.shape)))
        stripes.append(
            flat[send(striped_places(flat.numel()), flat.device)].to(dtype or tensor.dtype)
        )

    return {
        name: _hash(shape, stripe)
        for (name, shape), stripe in zip(shapes, to_host(stripes), strict=True)
    }


def _hash(shape: tuple[int, ...], stripe: Tensor) -> str:
    digest = hashlib.blake2b(f"{shape} {stripe.dtype}".encode(), digest_size=16)
    digest.update(stripe.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_version(current: Version, version: Version) -> None:
    """Raises ValueError if the version of sent weights goes back."""
    if version < current:
        raise ValueError(
            f"weights of {version} sent to an engine that has {current}: versions never decrease"
        )


class PartialWeightsError(RuntimeError):
    """Weights sent one by one did not fit after some were already loaded: the module has a mix of
    two versions."""


@dataclass(eq=False)
class EngineWeights:
    """The weights of an engine's module, replaced as a whole or not at all. shared: the module is
    the trainer's, so nothing is copied."""

    module: nn.Module
    shared: bool
    is_whole: bool = True
    _released: dict[str, str] = field(default_factory=dict, init=False)
    """Hashes of weights whose memory was freed."""

    def check_whole(self) -> None:
        """Raises RuntimeError after a copy that failed midway, and while the memory of the weights
        is freed."""
        if not self.is_whole:
            had = "loaded only a part of its last weights"
            if self._released:
                had = "has released its weights"
            raise RuntimeError(f"the rollout engine {had}, and does not use them")

    def release(self) -> None:
        """Free the memory of the engine's own weights until the next `load`. `hashes` stay
        unchanged."""
        if not self.shared and self.is_whole:
            self._released = self.hashes()
            self.is_whole = False
            for weight in self.module.parameters():
                weight.data = weight.data.new_empty(()).expand(weight.shape)

    def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return self._released or stripe_hashes(self.module.named_parameters(remove_duplicate=False))

    def load(
        self, current: Version, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """Load the weights of a version between two steps. If `weights` is None, the present
        weights get that version.

        Raises ValueError, with nothing changed, if the version goes back, if names or shapes do not
        fit, or, on shared storage, if a sent tensor is not the module's own.
        """
        check_version(current, version)
        if weights is None:
            return WeightReceipt(version, shared=self.shared, version_only=True)
        if self.shared:
            check_shared(self.module, weights)
            return WeightReceipt(version, shared=True)

        released = self._released
        self._released = {}

        if released:
            for weight in self.module.parameters():
                weight.data = weight.data.new_empty(weight.shape)

        was_whole = self.is_whole
        self.is_whole = False

        try:
            hashes = copy_weights(self.module, weights)
        except ValueError:
            self.is_whole = was_whole
            self._released = released
            raise

        self.is_whole = True
        return WeightReceipt(version, hashes)


def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Copy every parameter in place, cast to the module's types. Returns the hashes of what the
    module now holds.

    Tied parameters may be sent under any or all of their names. Raises ValueError, with nothing
    changed, if a sequence does not fit (`checked`). Other iterables are copied as they arrive, and
    raise PartialWeightsError.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    if isinstance(weights, Sequence):
        for _ in checked(own, weights):
            pass

    copied = dict[str, Tensor]()
    try:
        with torch.no_grad():
            for name, tensor in checked(own, weights):
                own[name].copy_(tensor)
                copied[name] = own[name]
    except ValueError as error:
        raise PartialWeightsError(f"weights were only partly loaded: {error}") from error

    return stripe_hashes(copied.items())


def checked(
    own: Mapping[str, nn.Parameter], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights as they arrive. Raises ValueError at the first whose name is unknown or repeated,
    whose shape differs, or that differs from one sent for the same parameter under another name;
    and at the end for missing ones.

    Only tensors of parameters with several names are kept meanwhile.
    """
    names = dict[int, list[str]]()
    for name, parameter in own.items():
        names.setdefault(id(parameter), []).append(name)

    sent = dict[str, Tensor]()
    for name, tensor in weights:
        if name not in own:
            raise ValueError(f"weights were rejected: {name}: unknown")
        if tensor.shape != own[name].shape:
            shapes = f"shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
            raise ValueError(f"weights were rejected: {name}: {shapes}")
        if name in sent:
            raise ValueError(f"weights were rejected: {name}: sent twice")

        of_tensor = names[id(own[name])]
        for other in of_tensor:
            if other in sent and not _is_same(sent[other], tensor):
                both = f"{other} and {name}: one tensor here, different values sent"
                raise ValueError(f"weights were rejected: {both}")

        sent[name] = tensor if len(of_tensor) > 1 else tensor.new_empty(0)
        yield name, tensor

    missing = [each[0] for each in names.values() if sent.keys().isdisjoint(each)]
    if missing:
        raise ValueError(f"weights were rejected: {', '.join(missing[:8])}: missing")


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first.data_ptr() == second.data_ptr():
        return True
    alike = first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(first, second)


def check_shared(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a sent tensor that is not the module's own storage: it would never be
    used."""
    own = dict(module.named_parameters(remove_duplicate=False))
    foreign = [
        name
        for name, tensor in weights
        if name not in own or tensor.data_ptr() != own[name].data_ptr()
    ]
    if foreign:
        raise ValueError(
            f"the engine shares the trainer's storage, but {len(foreign)} sent tensors are stored "
            f"elsewhere ({', '.join(foreign[:4])}): send the trainer's own parameters, or give the "
            "engine its own copy"
        )
