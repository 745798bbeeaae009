"""Attention over packed sequences: each sequence to itself, at the cost of its own length, on any device.

Registered with `transformers` under a name; a forward without `packing` is exactly its `sdpa`.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import TransformersKwargs

from distflow.data.transfer import send
from distflow.models.native import build as native
from distflow.models.native.attend import Sequences, attend
from distflow.models.rows import spread_rows, take_rows
from distflow.models.shared_prefixes import Sharing
from distflow.models.short_attention import LONGEST, attend_short

PACKED_ATTENTION = "distflow_packed"

# A bucket of sequences is padded to its longest; shorter ones than this share of it go to the next bucket.
_SHORTEST_IN_BUCKET = 0.75


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences in a packed row on `device`. What an attention wants to know of them is made once: layers share it.

    lengths: int64 `(sequences,)`, all at least 1, in packed order. sharing: the packed row has its kept tokens alone.
    Both on the CPU.
    """

    lengths: Tensor
    device: torch.device
    sharing: Sharing | None = None

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.of(self.lengths, self.sharing)

    @cached_property
    def buckets(self) -> "Buckets":
        return Buckets.of(self.lengths, self.device, self.sharing)


@dataclass(frozen=True)
class Buckets:
    """How a packed row divides into buckets of sequences of similar length, each padded on the right to its longest.

    shapes: (rows, longest) of each, their tokens one bucket after the other. source: int64 `(padded tokens,)`, the
    packed position of each; padding repeats some real token, since causal attention never lets a real token see it.
    home: int64 `(tokens,)`, where each packed token stands among the padded ones. again: where those stand that share
    their packed token with another sequence, all but the one that `home` names; None where none does.
    """

    shapes: tuple[tuple[int, int], ...]
    source: Tensor
    home: Tensor
    again: Tensor | None
    _by_heads: dict[int, "HeadRows"] = field(default_factory=dict)

    def of_heads(self, num_heads: int) -> "HeadRows":
        """The same of rows that are one head of a token each."""
        if num_heads not in self._by_heads:
            self._by_heads[num_heads] = HeadRows.of(self, num_heads)
        return self._by_heads[num_heads]

    @staticmethod
    def of(lengths: Tensor, device: torch.device, sharing: Sharing | None) -> "Buckets":
        """See `Packing`."""
        starts = lengths.cumsum(0) - lengths
        home = torch.empty(int(lengths.sum()), dtype=torch.int64)
        shapes: list[tuple[int, int]] = []
        sources: list[Tensor] = []
        num_padded = 0
        for rows in _similar(lengths):
            longest = int(lengths[rows].max())
            offsets = torch.arange(longest)[None, :].expand(len(rows), -1)
            real = offsets < lengths[rows][:, None]
            source = torch.where(real, starts[rows][:, None] + offsets, starts[rows][:, None])
            home[source[real]] = num_padded + torch.arange(source.numel()).view_as(source)[real]
            shapes.append((len(rows), longest))
            sources.append(source.reshape(-1))
            num_padded += source.numel()
        source, again = torch.cat(sources), None
        if sharing is not None:
            is_repeated = torch.ones_like(home, dtype=torch.bool).index_fill_(0, sharing.kept, False)
            source, home, again = sharing.place[source], home[sharing.kept], send(home[is_repeated], device)
        return Buckets(tuple(shapes), send(source, device), send(home, device), again)


class HeadRows(NamedTuple):
    """`Buckets.source`, `home` and `again` of `(tokens · heads)` rows, where a bucket is `(rows, heads, longest)`."""

    source: Tensor
    home: Tensor
    again: Tensor | None

    @staticmethod
    def of(buckets: Buckets, num_heads: int) -> "HeadRows":
        device = buckets.source.device
        heads, slots, start = torch.arange(num_heads, device=device), list[Tensor](), 0
        for rows, longest in buckets.shapes:
            size = rows * longest * num_heads
            numbers = torch.arange(start, start + size, device=device).view(rows, num_heads, longest)
            slots.append(numbers.transpose(1, 2).reshape(-1, num_heads))
            start += size
        slot = torch.cat(slots)
        source = torch.empty(start, dtype=torch.int64, device=device)
        source[slot.view(-1)] = (buckets.source[:, None] * num_heads + heads).view(-1)
        again = None if buckets.again is None else slot[buckets.again].view(-1)
        return HeadRows(source, slot[buckets.home].view(-1), again)


def _similar(lengths: Tensor) -> list[Tensor]:
    """Indices of sequences, grouped so that none is much shorter than the longest of its group."""
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


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[Tensor, None]:
    """query `(1, heads, tokens, head_dim)`, key and value with their own number of heads; returns
    `(1, tokens, heads, head_dim)`. With `packing` the mask is not read."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # On a CPU the kernel of 16-bit types takes five times as long backward as that of float32, copies included.
    dtype = torch.promote_types(query.dtype, torch.float32) if query.device.type == "cpu" else query.dtype
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu" and dtype == torch.float32 and dropout == 0.0 and native.is_there():
        queries, keys, values = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        return attend(queries, keys, values, packing.sequences, scale).to(query.dtype)[None], None
    buckets = packing.buckets
    padded = [_padded(x, buckets) for x in (query, key, value)]
    outputs = []
    for bucket in zip(*padded, strict=True):
        q, k, v = (x.to(dtype) for x in bucket)
        with torch.autocast("cpu", enabled=False):
            if q.device.type == "cpu" and q.shape[2] <= LONGEST and dropout == 0.0:
                out = attend_short(q, k, v, scale)
            else:
                shares_keys = q.shape[1] != k.shape[1]
                out = scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shares_keys
                )
        outputs.append(out.reshape(-1, out.shape[-1]).to(query.dtype))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    mixed = take_rows(rows, buckets.of_heads(query.shape[1]).home)
    return mixed.view(1, -1, query.shape[1], query.shape[3]), None


def _padded(x: Tensor, buckets: Buckets) -> list[Tensor]:
    """`(1, heads, tokens, head_dim)` → `(rows, heads, longest, head_dim)` of each bucket."""
    num_heads, _, dim = x.shape[1:]
    rows = spread_rows(x[0].transpose(0, 1).reshape(-1, dim), *buckets.of_heads(num_heads))
    shapes = [(rows, num_heads, longest) for rows, longest in buckets.shapes]
    parts = rows.split([math.prod(shape) for shape in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
