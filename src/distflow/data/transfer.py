"""Tensors on their way to a device, and numbers on their way back.

A device works through a queue. A copy from plain memory and every number that is read wait until the queue is empty; a
copy from pinned memory waits for nothing, and many numbers that are read together wait once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; from the host to a CUDA device by pinned memory, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Scalars of any devices and types as numbers, in their order: one transfer for all that a device has."""
    numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    places: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            places.setdefault(value.device, []).append(place)
    for on_device in places.values():
        scalars = [value.detach().double() for place in on_device if isinstance(value := values[place], Tensor)]
        for place, number in zip(on_device, torch.stack(scalars).tolist(), strict=True):
            numbers[place] = number
    return numbers
