"""A batch as plain bytes for transfer between processes, and a batch from rows of several such
batches. Code that transfers buffers needs to know nothing about tokens, dtypes or texts."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from distflow.data.batch import Batch

Buffers = Mapping[str, NDArray[np.uint8]]
"""Uint8 arrays `(bytes,)` by name, one for each tensor of `Batch.to_tensors`."""


def to_buffers(batch: Batch) -> dict[str, NDArray[np.uint8]]:
    """The batch as bytes; objects as JSON.

    Raises TypeError for an object that is not a JSON value. As with any JSON, a tuple comes back as
    a list.
    """
    tensors = batch.to_tensors()
    return {name: tensor.cpu().view(torch.uint8).numpy() for name, tensor in tensors.items()}


def gather(parts: Sequence[Buffers], picks: Sequence[tuple[int, int]]) -> Batch:
    """The batch of the rows `picks`, each as (part, row), in that order, of several batches, from
    memory that may be read-only and shared. Raises ValueError if the parts used differ in the name,
    dtype or axis of a column."""
    used = sorted({part for part, _ in picks}) or [0]
    batches = [_from_buffers(parts[part]) for part in used]

    first_of: dict[int, int] = {}
    num_rows = 0
    for part, batch in zip(used, batches, strict=True):
        first_of[part] = num_rows
        num_rows += len(batch)

    return Batch.concat(batches).select([first_of[part] + row for part, row in picks])


def _from_buffers(buffers: Buffers) -> Batch:
    copies = dict[str, torch.Tensor]()
    for name, values in buffers.items():
        # torch cannot read an empty array of numpy as another dtype
        empty = torch.empty(values.shape, dtype=torch.uint8)
        copies[name] = torch.from_numpy(values.copy()) if values.size else empty

    return Batch.from_tensors(copies)
