"""Copies of tensors between host and device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; from the host to an accelerator through pinned memory, without
    waiting."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dimension, of any devices and types, on the host: one transfer per device."""
    found = list(tensors)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        raw = [tensors[place].contiguous().view(torch.uint8) for place in places]
        copied = torch.cat(raw).cpu().split([len(part) for part in raw])
        for place, part in zip(places, copied, strict=True):
            # a part may begin where its type may not
            found[place] = part.clone().view(tensors[place].dtype)

    return found


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Scalars of any devices and types as numbers, in their order: one transfer per device."""
    numbers = [0.0] * len(values)
    alike = dict[torch.device, dict[torch.dtype, dict[int, Tensor]]]()
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            by_type = alike.setdefault(value.device, {})
            by_type.setdefault(value.dtype, {})[place] = value.detach()
        else:
            numbers[place] = float(value)

    for by_type in alike.values():
        places = list[int]()
        stacked = list[Tensor]()
        for same in by_type.values():
            places += same
            stacked.append(torch.stack([*same.values()]).double())

        # The device is waited for here, and nowhere else.
        read = torch.cat(stacked).tolist()
        for place, number in zip(places, read, strict=True):
            numbers[place] = number

    return numbers


def free_bytes(device: torch.device) -> int:
    """Memory of an accelerator that torch can still use: what is free, and what torch has reserved
    and does not use."""
    free, _ = torch.accelerator.get_memory_info(device)
    return (
        free
        + torch.accelerator.memory_reserved(device)
        - torch.accelerator.memory_allocated(device)
    )
