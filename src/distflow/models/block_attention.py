"""Attention of one token a row whose result does not depend on how much memory lies behind the row's position."""

import torch
from torch import Tensor

BLOCK = 64


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """query: `(rows, heads, head_dim)`; keys, values `(rows, kv_heads, extent, head_dim)`; bias: `(rows * kv_heads,
    heads of each, extent)`, -inf where a row does not look.

    Keys and values are gone through in blocks of 64 tokens, each by products of one shape, and their sums are added in
    order. A block that a row does not look at adds exact zeros, so a row's bits are the same whatever the extent is, as
    long as that is a multiple of a block. Returns `(rows * kv_heads, heads of each, head_dim)`.
    """
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    query = query.reshape(len(keys), -1, keys.shape[-1])
    blocks = [slice(start, start + BLOCK) for start in range(0, keys.shape[1], BLOCK)]
    scores = torch.cat(
        [
            torch.baddbmm(bias[..., block], query, keys[:, block].transpose(1, 2), alpha=scaling).float()
            for block in blocks
        ],
        dim=-1,
    )
    masses = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    # From +0 on, and no sum of it with zeros of either sign is -0: what adds nothing changes no bit.
    mixed = masses.new_zeros(query.shape)
    total = masses.new_zeros(*query.shape[:-1], 1)
    for block in blocks:
        mixed += torch.bmm(masses[..., block].to(values.dtype), values[:, block])
        total += masses[..., block].sum(dim=-1, keepdim=True)
    return (mixed / total).to(values.dtype)
