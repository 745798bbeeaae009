"""The layout of sequences in a packed row, and the prefixes that they share.

A causal model's state of a token depends only on the tokens before it, so prefixes that packed
sequences share are computed once. The responses to one prompt share its tokens, and any common
prefix; all prompts share a template's head. Shared tokens pass through every layer once, except for
attention, where each sequence is whole.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.device_transfer import send


@dataclass(frozen=True)
class Sharing:
    """The tokens of packed sequences that are computed, once for all that begin alike. Both tensors
    are int64 on the CPU."""

    positions: Tensor
    """`(kept tokens,)`: the packed positions of the computed tokens, ascending."""
    place: Tensor
    """`(tokens,)`: the index among them of each packed token's state."""


def shared_prefixes(input_ids: Tensor, lengths: Tensor) -> Sharing | None:
    """The prefixes that packed sequences share with their predecessor; None if there are none.

    input_ids: int64 `(tokens,)`, lengths: int64 `(sequences,)`, both on the CPU.
    """
    if len(lengths) < 2:
        return None

    is_token = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    table = input_ids.new_zeros(is_token.shape).masked_scatter_(is_token, input_ids)
    alike = (table[1:] == table[:-1]) & is_token[1:] & is_token[:-1]
    is_kept = is_token.clone()
    is_kept[1:] &= alike.cumprod(1) == 0
    positions = is_kept[is_token].nonzero()[:, 0]
    if len(positions) == len(input_ids):
        return None

    # In a column, shared tokens repeat the last kept token above them; numbers grow downwards.
    numbers = torch.full(is_token.shape, -1).masked_scatter_(is_kept, torch.arange(len(positions)))
    return Sharing(positions, numbers.cummax(0).values[is_token])


@dataclass(frozen=True)
class Sequences:
    """Packed sequences for native code; tensors are int64 on the CPU."""

    place: Tensor
    """`(tokens,)`: the row of each token."""
    starts: Tensor
    """`(sequences + 1,)`, in `place`."""
    shared: Tensor
    """`(sequences,)`: the number of leading tokens that share an earlier sequence's rows; the other
    rows are consecutive."""
    longest: int
    """Tokens of the longest sequence."""

    @staticmethod
    def of(lengths: Tensor, sharing: Sharing | None) -> "Sequences":
        """lengths: int64 `(sequences,)`, all at least 1, on the CPU."""
        starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        longest = int(lengths.max())

        if sharing is None:
            return Sequences(
                torch.arange(int(starts[-1])), starts, torch.zeros_like(lengths), longest
            )

        is_kept = torch.zeros(len(sharing.place) + 1, dtype=torch.int64)
        num_before = is_kept.index_fill_(0, sharing.positions + 1, 1).cumsum(0)
        num_kept = num_before[starts[1:]] - num_before[starts[:-1]]
        return Sequences(sharing.place, starts, lengths - num_kept, longest)


class Spread(NamedTuple):
    """How kept rows become whole sequences, one after another; all int64 on the device."""

    place: Tensor
    """`(tokens,)`: the kept row of each packed token."""
    first: Tensor
    """`(kept rows,)`: the packed token that each row was kept for."""
    again: Tensor
    """`(tokens - kept rows,)`: the packed tokens that share a row with an earlier one."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences in a packed row. What attention needs to know is computed once, and shared by
    layers."""

    lengths: Tensor
    """int64 `(sequences,)`, all at least 1, in packed order, on the CPU."""
    device: torch.device
    """Of the packed row."""
    sharing: Sharing | None = None
    """The packed row has only its kept tokens."""

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.of(self.lengths, self.sharing)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def bounds(self) -> Tensor:
        """int32 `(sequences + 1,)` on the device: the start of each whole sequence, and the end."""
        starts = torch.cat((self.lengths.new_zeros(1), self.lengths.cumsum(0)))
        return send(starts.int(), self.device)

    @cached_property
    def spread(self) -> Spread:
        """Requires `sharing`."""
        assert self.sharing is not None
        place = self.sharing.place
        positions = self.sharing.positions
        is_again = torch.ones_like(place, dtype=torch.bool).index_fill_(0, positions, False)
        again = is_again.nonzero()[:, 0]
        return Spread(*(send(each, self.device) for each in (place, positions, again)))
