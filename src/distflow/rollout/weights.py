"""Taking a trainer's weights into an engine's module: all or nothing, each tensor by its Hugging Face name."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distflow.flow.ticket import Version
from distflow.rollout.receipts import stripe_hashes


def check_version(current: Version, new: Version) -> None:
    if new < current:
        raise ValueError(f"weights of {new} offered to an engine that serves {current}: versions never go back")


def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Copy every parameter in place, cast to the module's types. Returns the hashes of what the module now holds.

    Tied parameters may be sent under any or all of their names. Raises ValueError, with nothing changed, when a
    name is unknown, missing or doubled, when a shape differs, or when two names of one tensor bring different values.
    """
    sent = list(weights)
    named = dict(sent)
    own = dict(module.named_parameters(remove_duplicate=False))
    problems = [f"{name}: sent twice" for name in _doubled(name for name, _ in sent)]
    problems += [f"{name}: unknown" for name in named if name not in own]
    problems += [
        f"{name}: shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        for name, tensor in named.items()
        if name in own and tensor.shape != own[name].shape
    ]
    for names in _names_by_parameter(own):
        present = [name for name in names if name in named]
        if not present:
            problems.append(f"{names[0]}: missing")
        elif any(not _same(named[present[0]], named[other]) for other in present[1:]):
            problems.append(f"{' and '.join(present)}: one tensor here, different values sent")
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"weights not taken, nothing changed: {'; '.join(problems[:8])}{more}")
    with torch.no_grad():
        for name, tensor in named.items():
            own[name].copy_(tensor)
    return stripe_hashes((name, own[name]) for name in named)


def check_shared(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a sent tensor that is not the module's own storage: it would never be computed with."""
    own = dict(module.named_parameters(remove_duplicate=False))
    foreign = [name for name, tensor in weights if name not in own or tensor.data_ptr() != own[name].data_ptr()]
    if foreign:
        raise ValueError(
            f"the engine shares the trainer's storage, but {len(foreign)} sent tensors lie elsewhere "
            f"({', '.join(foreign[:4])}): send the trainer's own parameters, or give the engine its own copy"
        )


def _names_by_parameter(own: dict[str, nn.Parameter]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in own.items():
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _doubled(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)
