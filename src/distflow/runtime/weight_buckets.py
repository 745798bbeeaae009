"""A bucket of weights on its way to other processes: its bytes, a hash of all of them, and who carries it."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.flow.ticket import Version
from distflow.runtime.ports.weights import Bucket

Packed = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]
"""Of each tensor its name, dtype and shape, and its bytes."""


class Spoiled(ValueError):
    """What has arrived is not what was sent."""


class Sent(Protocol):
    """A bucket where it was put for others: small, and it pickles."""

    def get(self) -> list[tuple[str, Tensor]]:
        """On the CPU, in memory of their own, in any order. Raises Spoiled where it cannot be read as it was put,
        UserError where it cannot be seen from here at all."""
        ...

    def drop(self) -> None:
        """Nobody reads it any more."""
        ...


Carry = Callable[[Version, int, Packed], Sent]
"""Puts a bucket of a version, by its number from 0, where other processes can read it."""


def pack(weights: Bucket) -> Packed:
    """Their own memory seen as bytes, where it is the CPU's."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor))
        for name, tensor in weights
    ]


def unpack(packed: Packed) -> list[tuple[str, Tensor]]:
    """On the memory of the bytes."""
    return [(name, _tensor(getattr(torch, dtype), shape, values)) for name, dtype, shape, values in packed]


def hash_of(packed: Packed) -> str:
    """Of all names, dtypes, shapes and bytes, in whatever order they come; by as many threads as torch has."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        hashes = sorted(pool.map(_hash_of_tensor, packed))
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _hash_of_tensor(each: tuple[str, str, tuple[int, ...], NDArray[np.uint8]]) -> str:
    name, dtype, shape, values = each
    digest = hashlib.sha256(f"{name} {dtype} {shape}\n".encode())
    digest.update(values.data)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    values: NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return values


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], values: NDArray[np.uint8]) -> Tensor:
    if not len(values):  # which torch gives strides that no other dtype can have
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(values).view(dtype).view(shape)
