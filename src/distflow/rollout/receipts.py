"""Receipts of weight updates: a hash of a stripe of each tensor, computed alike by sender and receiver."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

STRIPE_LENGTH = 1024


def striped_places(numel: int) -> Tensor:
    """Which elements of a tensor of that size are looked at: at most `STRIPE_LENGTH`, evenly spaced.

    The stride is odd, so that it does not stay in a few columns of a matrix whose width is a power of two.
    """
    return torch.arange(0, numel, -(-numel // STRIPE_LENGTH) | 1)


def stripe_hash(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Hash of the elements at `striped_places`, with the shape and the dtype.

    dtype: what the receiver stores, where the sender keeps another; the stripe is cast before it is hashed.
    """
    dtype = dtype or tensor.dtype
    flat = tensor.detach().reshape(-1)
    sampled = flat[striped_places(flat.numel()).to(flat.device)]
    stripe = torch.empty(sampled.shape, dtype=dtype).copy_(sampled)
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {dtype}".encode(), digest_size=16)
    digest.update(stripe.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stripe_hashes(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """The hash of each named tensor, as in a receipt."""
    return {name: stripe_hash(tensor, dtype) for name, tensor in weights}
