"""Receipts of weight updates: a hash of a stripe of each tensor, computed alike by sender and receiver."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

STRIPE_LENGTH = 1024


def stripe_hash(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Hash of at most `STRIPE_LENGTH` evenly spaced elements, with the shape and the dtype.

    The stride is odd, so that it does not stay in a few columns of a matrix whose width is a power of two.
    dtype: what the receiver stores, where the sender keeps another; the stripe is cast before it is hashed.
    """
    dtype = dtype or tensor.dtype
    flat = tensor.detach().reshape(-1)
    sampled = flat[:: -(-flat.numel() // STRIPE_LENGTH) | 1]
    stripe = torch.empty(sampled.shape, dtype=dtype).copy_(sampled)
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {dtype}".encode(), digest_size=16)
    digest.update(stripe.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stripe_hashes(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """The hash of each named tensor, as in a receipt."""
    return {name: stripe_hash(tensor, dtype) for name, tensor in weights}
