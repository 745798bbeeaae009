"""Attention over packed sequences: each sequence to itself, at the cost of its own length, on any device.

Registered with `transformers` under a name; a forward without `packing` is exactly its `sdpa`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import TransformersKwargs

from distflow.models.rows import spread_rows, take_rows

PACKED_ATTENTION = "distflow_packed"

P = ParamSpec("P")

# A bucket of sequences is padded to its longest; shorter ones than this share of it go to the next bucket.
_SHORTEST_IN_BUCKET = 0.75

_mask_is_ours: ContextVar[bool] = ContextVar("distflow_packed_mask", default=False)


@dataclass(frozen=True)
class Packing:
    """How a packed row divides into buckets of sequences of similar length, each padded on the right to its longest.

    buckets: (rows, longest) of each, their tokens one bucket after the other. source: int64 `(padded tokens,)`, the
    packed position of each; padding repeats some real token, since causal attention never lets a real token see it.
    home: int64 `(tokens,)`, where each packed token stands among the padded ones.
    """

    buckets: tuple[tuple[int, int], ...]
    source: Tensor
    home: Tensor

    @staticmethod
    def of(lengths: Tensor, device: torch.device) -> "Packing":
        """lengths: int64 `(sequences,)` on the CPU, all at least 1, in packed order."""
        starts = lengths.cumsum(0) - lengths
        home = torch.empty(int(lengths.sum()), dtype=torch.int64)
        buckets: list[tuple[int, int]] = []
        sources: list[Tensor] = []
        num_padded = 0
        for rows in _similar(lengths):
            longest = int(lengths[rows].max())
            offsets = torch.arange(longest)[None, :].expand(len(rows), -1)
            real = offsets < lengths[rows][:, None]
            source = torch.where(real, starts[rows][:, None] + offsets, starts[rows][:, None])
            home[source[real]] = num_padded + torch.arange(source.numel()).view_as(source)[real]
            buckets.append((len(rows), longest))
            sources.append(source.reshape(-1))
            num_padded += source.numel()
        return Packing(tuple(buckets), torch.cat(sources).to(device), home.to(device))


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


@contextmanager
def without_dense_mask() -> Iterator[None]:
    """Inside, `transformers` builds no `(tokens, tokens)` mask for a packed row: `packing` replaces it."""
    token = _mask_is_ours.set(True)
    try:
        yield
    finally:
        _mask_is_ours.reset(token)


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
    `(1, tokens, heads, head_dim)`."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    sizes = [rows * longest for rows, longest in packing.buckets]
    padded = [spread_rows(x[0].transpose(0, 1), packing.source, packing.home).split(sizes) for x in (query, key, value)]
    outputs = []
    for shape, *bucket in zip(packing.buckets, *padded, strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in bucket)
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return take_rows(torch.cat(outputs), packing.home)[None], None


def _unless_packed(dense_mask: Callable[P, Tensor | None]) -> Callable[P, Tensor | None]:
    """The same mask, but none inside `without_dense_mask`."""

    def mask(*args: P.args, **kwargs: P.kwargs) -> Tensor | None:
        return None if _mask_is_ours.get() else dense_mask(*args, **kwargs)

    return mask


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _unless_packed(sdpa_mask))
