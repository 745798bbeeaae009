"""The layout of sequences in a packed row: shared prefixes, and buckets of similar length.

A causal model's state of a token depends only on the tokens before it, so prefixes that packed
sequences share are computed once. The responses to one prompt share its tokens, and any common
prefix; all prompts share a template's head. Shared tokens pass through every layer once, except for
attention, where each sequence is whole.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.device_transfer import send

# A bucket is padded to its longest sequence; those shorter than this share of it go to the next
# bucket.
_SHORTEST_IN_BUCKET = 0.75


@dataclass(frozen=True)
class Sharing:
    """positions: int64 `(kept tokens,)`, the packed positions of the computed tokens, ascending.
    place: int64 `(tokens,)`, the index among them of each packed token's state. Both on the CPU."""

    positions: Tensor
    place: Tensor


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
    """Packed sequences, all int64 on the CPU. place: `(tokens,)`, the row of each token. starts:
    `(sequences + 1,)`, in `place`. shared: `(sequences,)`, number of leading tokens that share an
    earlier sequence's rows; the other rows are consecutive."""

    place: Tensor
    starts: Tensor
    shared: Tensor
    longest: int

    @staticmethod
    def of(lengths: Tensor, sharing: Sharing | None) -> "Sequences":
        """lengths: int64 `(sequences,)`, all at least 1, on the CPU."""
        starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        longest = int(lengths.max())
        if sharing is None:
            return Sequences(
                torch.arange(int(starts[-1])), starts, torch.zeros_like(lengths), longest
            )
        num_before = (
            torch.zeros(len(sharing.place) + 1, dtype=torch.int64)
            .index_fill_(0, sharing.positions + 1, 1)
            .cumsum(0)
        )
        return Sequences(
            sharing.place,
            starts,
            lengths - (num_before[starts[1:]] - num_before[starts[:-1]]),
            longest,
        )


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences in a packed row on `device`. What attention needs to know is computed once, and
    shared by layers.

    lengths: int64 `(sequences,)`, all at least 1, in packed order. sharing: the packed row has only
    its kept tokens. Both on the CPU.
    """

    lengths: Tensor
    device: torch.device
    sharing: Sharing | None = None

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.of(self.lengths, self.sharing)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def bounds(self) -> Tensor:
        """int32 `(sequences + 1,)` on the device: the start of each whole sequence, and the end."""
        return send(
            torch.cat((self.lengths.new_zeros(1), self.lengths.cumsum(0))).int(), self.device
        )

    @cached_property
    def whole(self) -> "Buckets":
        """The whole sequences one after another, without padding. Requires `sharing`."""
        assert self.sharing is not None
        place = self.sharing.place
        positions = self.sharing.positions
        is_repeated = torch.ones_like(place, dtype=torch.bool).index_fill_(0, positions, False)
        again = send(is_repeated.nonzero()[:, 0], self.device)
        return Buckets((), send(place, self.device), send(positions, self.device), again)

    @cached_property
    def buckets(self) -> "Buckets":
        return self._padded(_similar(self.lengths))

    @cached_property
    def table(self) -> "Buckets":
        """All sequences in one bucket."""
        return self._padded([torch.arange(len(self.lengths))])

    def _padded(self, groups: list[Tensor]) -> "Buckets":
        """groups: the numbers of the sequences in each bucket."""
        lengths = self.lengths
        sharing = self.sharing
        starts = lengths.cumsum(0) - lengths
        home = torch.empty(int(lengths.sum()), dtype=torch.int64)
        shapes: list[tuple[int, int]] = []
        sources: list[Tensor] = []
        num_padded = 0
        for rows in groups:
            longest = int(lengths[rows].max())
            offsets = torch.arange(longest)[None, :].expand(len(rows), -1)
            real = offsets < lengths[rows][:, None]
            source = torch.where(real, starts[rows][:, None] + offsets, starts[rows][:, None])
            home[source[real]] = num_padded + torch.arange(source.numel()).view_as(source)[real]
            shapes.append((len(rows), longest))
            sources.append(source.reshape(-1))
            num_padded += source.numel()
        source = torch.cat(sources)
        again = None
        if sharing is not None:
            is_repeated = torch.ones_like(home, dtype=torch.bool).index_fill_(
                0, sharing.positions, False
            )
            source, home, again = (
                sharing.place[source],
                home[sharing.positions],
                send(home[is_repeated], self.device),
            )
        return Buckets(tuple(shapes), send(source, self.device), send(home, self.device), again)


@dataclass(frozen=True)
class Buckets:
    """How a packed row divides into buckets of sequences of similar length, each padded on the
    right to its longest.

    shapes: (rows, longest) of each, their tokens one bucket after the other. source: int64
    `(padded tokens,)`, the packed position of each; padding repeats some real token, since causal
    attention never lets a real token see it. home: int64 `(tokens,)`, the position of each packed
    token among the padded ones. again: further positions of packed tokens that sequences share;
    None if there are none.
    """

    shapes: tuple[tuple[int, int], ...]
    source: Tensor
    home: Tensor
    again: Tensor | None
    _by_heads: dict[int, "HeadRows"] = field(default_factory=dict)

    def of_heads(self, num_heads: int) -> "HeadRows":
        """The buckets for rows that are one head of a token each."""
        if num_heads not in self._by_heads:
            device = self.source.device
            heads = torch.arange(num_heads, device=device)
            slots = list[Tensor]()
            start = 0
            for rows, longest in self.shapes:
                size = rows * longest * num_heads
                numbers = torch.arange(start, start + size, device=device).view(
                    rows, num_heads, longest
                )
                slots.append(numbers.transpose(1, 2).reshape(-1, num_heads))
                start += size
            slot = torch.cat(slots)
            source = torch.empty(start, dtype=torch.int64, device=device)
            source[slot.view(-1)] = (self.source[:, None] * num_heads + heads).view(-1)
            again = None if self.again is None else slot[self.again].view(-1)
            self._by_heads[num_heads] = HeadRows(source, slot[self.home].view(-1), again)
        return self._by_heads[num_heads]


class HeadRows(NamedTuple):
    """`Buckets.source`, `home` and `again` of `(tokens · heads)` rows, where a bucket is
    `(rows, heads, longest)`."""

    source: Tensor
    home: Tensor
    again: Tensor | None


def _similar(lengths: Tensor) -> list[Tensor]:
    """Indices of sequences, grouped so that none is much shorter than the longest in its group."""
    by_length = lengths.tolist()
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(by_length)), key=lambda i: -by_length[i]):
        length = by_length[index]
        if not groups or length < _SHORTEST_IN_BUCKET * longest:
            groups.append([])
            longest = length
        groups[-1].append(index)
    return [torch.tensor(group) for group in groups]
