"""Computes shared prefixes of packed sequences once: a causal model's state of a token depends only on the tokens
before it.

The responses to one prompt share its tokens, and any common prefix; all prompts share a template's head.
Shared tokens pass through every layer once, except for attention, where each sequence is whole.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sharing:
    """kept: int64 `(kept tokens,)`, the packed positions of the tokens that are computed, ascending. place: int64
    `(tokens,)`, where among them each packed token's state is. Both on the CPU."""

    kept: Tensor
    place: Tensor


def shared_prefixes(input_ids: Tensor, lengths: Tensor) -> Sharing | None:
    """What each packed sequence has in common with the one before it; None where that is nothing anywhere.

    input_ids: int64 `(tokens,)`, lengths: int64 `(sequences,)`, both on the CPU.
    """
    if len(lengths) < 2:
        return None
    is_token = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    table = input_ids.new_zeros(is_token.shape).masked_scatter_(is_token, input_ids)
    alike = (table[1:] == table[:-1]) & is_token[1:] & is_token[:-1]
    is_kept = is_token.clone()
    is_kept[1:] &= alike.cumprod(1) == 0
    kept = is_kept[is_token].nonzero()[:, 0]
    if len(kept) == len(input_ids):
        return None
    # Down a column the last kept token is the one that all shared ones below it repeat; numbers grow downwards.
    numbers = torch.full(is_token.shape, -1).masked_scatter_(is_kept, torch.arange(len(kept)))
    return Sharing(kept, numbers.cummax(0).values[is_token])
