"""Copies of tensors between host and device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; from the host to an accelerator through pinned memory, without waiting."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Scalars of any devices and types as numbers, in their order: one transfer per device."""
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
