"""Attention over packed sequences: each attends to itself, at the cost of its own length, on any
device.

It is registered with `transformers`; a forward without `packing` is exactly its `sdpa`. The file
also has

- `take_rows`: rows by index, with a backward pass that knows which rows repeat. Autograd's backward
  of `index_select` must assume that all do, with additions in no fixed order on a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distflow.models.context_share import Chunk, ContextShare
from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels.training_layer import attend
from distflow.models.packed_layout import Packing, Spread

MAX_HEAD_DIM = 256
"""The widest head of `varlen_attn`, whose heads are multiples of 8."""


def take_rows(values: Tensor, index: Tensor, repeats: bool = False) -> Tensor:
    """`values[index]` along dimension 0. repeats: whether `index` may contain a row many times."""
    return _Rows.apply(values, index, repeats)


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, repeats: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = values.shape[0]
        ctx.repeats = repeats
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        if ctx.repeats:
            return _add_rows(total, index, grad), None, None
        return total.index_copy_(0, index, grad), None, None


def spread_rows(values: Tensor, spread: Spread) -> Tensor:
    """`values[spread.place]`: the rows of whole sequences from the kept ones."""
    return _SpreadRows.apply(values, *spread)


class _SpreadRows(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Tensor, first: Tensor, again: Tensor) -> Tensor:
        ctx.save_for_backward(first, again, place[again])
        return values.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        first, again, shared = ctx.saved_tensors
        own = grad.index_select(0, first)
        return _add_rows(own, shared, grad.index_select(0, again)), None, None, None


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add rows in place, in the same order each time."""
    if total.device.type == "cpu":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)


PACKED_ATTENTION = "distflow_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | ContextShare | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `(1, heads, tokens, head_dim)`, key and value with their own number of heads; returns
    `(1, tokens, heads, value_dim)`. Arguments are those of `sdpa`; with `packing`, only dropout and
    scaling are read besides the tensors, and not the mask."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    # On a CPU the kernel of 16-bit types takes five times as long backward as that of float32,
    # copies included.
    on_cpu = query.device.type == "cpu"
    if on_cpu:
        dtype = torch.promote_types(query.dtype, torch.float32)
    else:
        dtype = query.dtype

    queries, keys, values = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    dropout: float = kwargs.get("dropout", 0.0)
    scale: float = kwargs.get("scaling") or query.shape[-1] ** -0.5
    one_width = values.shape[2] == keys.shape[2]  # DeepSeek's values are narrower than its keys
    is_plain = dropout == 0.0 and one_width

    if isinstance(packing, ContextShare):
        mixed = _attend_in_share(packing, queries, keys, values, scale, dropout)
        return mixed.to(query.dtype)[None], None

    is_ours = on_cpu and dtype == torch.float32 and is_plain
    if is_ours and native.is_there():
        mixed = attend(queries, keys, values, packing.sequences, scale)
    elif query.is_cuda and is_plain and _fits_one_call(queries):
        mixed = attend_together(packing, queries, keys, values, scale)
    else:
        mixed = _attend_one_by_one(queries, keys, values, packing, scale, dropout)

    return mixed.to(query.dtype)[None], None


def _fits_one_call(queries: Tensor) -> bool:
    head_dim = queries.shape[-1]
    is_16_bits = queries.dtype in (torch.bfloat16, torch.float16)
    return is_16_bits and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


def attend_together(
    packing: Packing, queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Causal attention of all sequences in one call, on a GPU in 16 bits; rows that sequences share
    are duplicated for each.

    queries `(rows, heads, head_dim)`; keys and values have their own number of heads. Returns a
    tensor like queries.
    """
    if packing.sharing is not None:
        queries = spread_rows(queries, packing.spread)
        keys = spread_rows(keys, packing.spread)
        values = spread_rows(values, packing.spread)

    bounds = packing.bounds
    longest = packing.longest
    mixed = _varlen(queries, keys, values, (bounds, bounds), (longest, longest), scale)
    if packing.sharing is None:
        return mixed

    return take_rows(mixed, packing.spread.first)


def _varlen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
) -> Tensor:
    """Causal attention of the last queries to all keys of each sequence; bounds and longest: of
    queries and of keys."""
    # Its import takes as long as that of torch, and only a GPU needs it.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scale}

    # Newer versions of torch must be told that keys and values have fewer heads.
    if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        options["enable_gqa"] = True
    mixed = varlen_attn(queries, keys, values, *bounds, *longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed


def _attend_in_share(
    share: ContextShare,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    dropout: float,
) -> Tensor:
    """Causal attention of this rank's rows `(own rows, heads, head_dim)` to those of all ranks."""
    widths = [keys.shape[2], values.shape[2]]
    both = share.gather_rows(torch.cat((keys, values), 2))
    by_device = queries.is_cuda and dropout == 0.0 and widths[0] == widths[1]

    found = []
    for chunk, query in zip(share.chunks, queries.chunk(2), strict=True):
        if isinstance(chunk.keys, slice):
            rows = both[chunk.keys]
        else:
            rows = take_rows(both, chunk.keys, repeats=True)

        key, value = rows.split(widths, 2)
        if by_device and _fits_one_call(query):
            longest = (int(chunk.num_queries.max()), int(chunk.num_keys.max()))
            found.append(_varlen(query, key, value, chunk.bounds, longest, scale))
        else:
            found.append(_attend_by_piece(chunk, query, key, value, scale, dropout))

    return torch.cat(found)


def _attend_by_piece(
    chunk: Chunk, queries: Tensor, keys: Tensor, values: Tensor, scale: float, dropout: float
) -> Tensor:
    num_queries, num_keys = chunk.num_queries.tolist(), chunk.num_keys.tolist()
    by_piece = zip(
        queries.transpose(0, 1)[None].split(num_queries, 2),
        keys.transpose(0, 1)[None].split(num_keys, 2),
        values.transpose(0, 1)[None].split(num_keys, 2),
        chunk.masks,
        strict=True,
    )

    found = []
    for query, key, value, mask in by_piece:
        with torch.autocast(query.device.type, enabled=False):
            mixed = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask.to(query.dtype),
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        found.append(mixed[0].transpose(0, 1))

    return torch.cat(found)


def _attend_one_by_one(
    queries: Tensor, keys: Tensor, values: Tensor, packing: Packing, scale: float, dropout: float
) -> Tensor:
    """Causal attention of `(rows, heads, head_dim)` by torch, sequence by sequence."""
    operands = [queries, keys, values]
    if packing.sharing is not None:
        operands = [spread_rows(each, packing.spread) for each in operands]
    lengths = packing.lengths.tolist()
    by_sequence = [each.transpose(0, 1)[None].split(lengths, 2) for each in operands]

    found = []
    with torch.autocast("cpu", enabled=False):
        for query, key, value in zip(*by_sequence, strict=True):
            mixed = scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            found.append(mixed[0].transpose(0, 1))

    rows = torch.cat(found)
    if packing.sharing is None:
        return rows
    return take_rows(rows, packing.spread.first)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
