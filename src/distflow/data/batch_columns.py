"""Fields of unregistered columns, and transfers between host and device.

A device works through a queue. A copy from plain memory and every number that is read wait until the queue is empty; a
copy from pinned memory waits for nothing, and many numbers that are read together wait once.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.graph.fields import Axis, Field

Column = Tensor | list[object]
Written = Tensor | NDArray[np.generic] | Sequence[object]
Shapes = Mapping[Axis, tuple[tuple[int, ...], ...]]


def guess_field(name: str, value: Written, shapes: Shapes) -> Field:
    """The field of an unregistered column, inferred from its shape; plain objects if it has none.

    shapes: possible shapes by axis. Raises ValueError if the shape fits none or several.
    """
    if not isinstance(value, Tensor | np.ndarray):
        return Field(name, "object", Axis.OBJECT)
    tensor = torch.as_tensor(value)
    shape = tuple(tensor.shape)
    fitting = [axis for axis, wanted in shapes.items() if shape in wanted]
    if len(fitting) == 1:
        return Field(name, str(tensor.dtype).removeprefix("torch."), fitting[0])
    found = "; ".join(f"{axis.value}: {' or '.join(map(str, shapes[axis]))}" for axis in fitting or shapes)
    raise ValueError(
        f"column '{name}' of shape {shape} fits {'more than one' if fitting else 'no'} axis of this batch ({found}): "
        f"declare it once by register_field('{name}', dtype=..., axis=...)"
    )


def check_same_fields(ours: Mapping[str, Field], theirs: Mapping[str, Field]) -> None:
    """Raises ValueError if a column that both have differs in dtype or axis."""
    different = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if different:
        name = different[0]
        raise ValueError(
            f"column '{name}' is {ours[name]} in one batch and {theirs[name]} in another: write the same in both, or "
            f"declare it by register_field('{name}', dtype=..., axis=...)"
        )


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; from the host to a CUDA device through pinned memory, without waiting."""
    if device.type == "cuda" and tensor.device.type == "cpu":
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
