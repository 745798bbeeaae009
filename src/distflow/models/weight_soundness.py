"""Finds weights that are not finite or implausibly large, such as 1e30 after a bit flip."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from distflow.device_transfer import read_numbers
from distflow.models.sharding import own_part

LARGEST: Final = 65504.0
"""The largest number of float16, into which the weights of published models fit; healthy ones stay
below 1,000."""

GROWTH: Final = 1000.0
"""How many times its largest element (at least 1) a tensor may grow to: far beyond what training
does, which moves an element by about the learning rate per step."""


def magnitudes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """The largest absolute value of each tensor (this rank's part of a sharded one); NaN if it
    contains one."""
    names = []
    ends = list[Tensor]()
    for name, tensor in tensors:
        part = own_part(tensor.detach())
        if part.numel():
            names.append(name)
            ends += torch.aminmax(part)

    numbers = read_numbers(ends)
    largest = {}
    for name, low, high in zip(names, numbers[::2], numbers[1::2], strict=True):
        largest[name] = max(-low, high)  # both are NaN if one is

    return largest


def unsound(found: Mapping[str, float], start: Mapping[str, float] | None = None) -> list[str]:
    """Descriptions of tensors with implausible magnitudes.

    start: their magnitudes when last known to be sound; for tensors without one, only `LARGEST`
    counts.
    """
    limits = {name: min(GROWTH * max(value, 1.0), LARGEST) for name, value in (start or {}).items()}
    wrong = []
    for name, value in found.items():
        limit = limits.get(name, LARGEST)
        if not value <= limit:  # NaN too
            wrong.append(f"'{name}' holds {value:.3g} (limit {limit:g})")

    return wrong
