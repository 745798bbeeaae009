"""Weights that no training gives: not finite, or finite garbage, such as the 1e30 of a flipped bit."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from distflow.data.transfer import read_numbers
from distflow.models.shards import own_part

LARGEST: Final = 65504.0
"""The largest number of float16, into which the weights of published models fit; healthy ones stay below 1,000."""

GROWTH: Final = 1000.0
"""How many times its largest element, or 1 where that is less, a tensor may grow to: far beyond what training does,
which moves an element by about the learning rate a step."""


def magnitudes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """The largest absolute value of each tensor, of a sharded one of this rank's part; NaN where it has one."""
    parts = ((name, own_part(tensor.detach())) for name, tensor in tensors)
    found = {name: _magnitude(part) for name, part in parts if part.numel()}
    return dict(zip(found, read_numbers(list(found.values())), strict=True))


def unsound(found: Mapping[str, float], start: Mapping[str, float] | None = None) -> list[str]:
    """The tensors whose magnitude is garbage, in words.

    start: their magnitudes when they were last known to be sound; without it, or without a tensor's, `LARGEST` alone
    counts.
    """
    limits = {name: min(GROWTH * max(value, 1.0), LARGEST) for name, value in (start or {}).items()}
    wrong = [(name, value, limits.get(name, LARGEST)) for name, value in found.items()]
    return [f"'{name}' holds {value:.3g} (limit {limit:g})" for name, value, limit in wrong if not value <= limit]


def _magnitude(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high)
