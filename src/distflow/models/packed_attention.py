"""Attention over packed sequences: each attends to itself, at the cost of its own length, on any
device.

It is registered with `transformers`; a forward without `packing` is exactly its `sdpa`. The file
also has

- `take_rows`: rows by index, with a backward pass that knows which rows repeat. Autograd's backward
  of `index_select` must assume that all do, with additions in no fixed order on a GPU.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels.training_layer import attend
from distflow.models.packed_layout import Buckets, Packing


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
        return (
            _add_rows(total, index, grad) if ctx.repeats else total.index_copy_(0, index, grad),
            None,
            None,
        )


def spread_rows(values: Tensor, source: Tensor, home: Tensor, again: Tensor | None) -> Tensor:
    """`values[source]`, where row i of `values` counts only as row `home[i]` of the result and, if
    given, as the rows in `again`.

    The other rows are padding: `source` may repeat there, and the caller ensures that they get no
    gradient.
    """
    return _SpreadRows.apply(values, source, home, again)


class _SpreadRows(Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, source: Tensor, home: Tensor, again: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(home, again, None if again is None else source[again])
        return values.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        home, again, repeated = ctx.saved_tensors
        summed = grad.index_select(0, home)
        return (
            summed if again is None else _add_rows(summed, repeated, grad.index_select(0, again)),
            None,
            None,
            None,
        )


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
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `(1, heads, tokens, head_dim)`, key and value with their own number of heads; returns
    `(1, tokens, heads, value_dim)`. Arguments are those of `sdpa`; with `packing`, only dropout and
    scaling are read besides the tensors, and not the mask."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    dropout: float = kwargs.get("dropout", 0.0)
    scaling: float | None = kwargs.get("scaling")
    # On a CPU the kernel of 16-bit types takes five times as long backward as that of float32,
    # copies included.
    dtype = (
        torch.promote_types(query.dtype, torch.float32)
        if query.device.type == "cpu"
        else query.dtype
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    one_width = value.shape[3] == query.shape[3]  # DeepSeek's values are narrower than its keys
    if (
        query.device.type == "cpu"
        and dtype == torch.float32
        and dropout == 0.0
        and one_width
        and native.is_there()
    ):
        queries, keys, values = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        return attend(queries, keys, values, packing.sequences, scale).to(query.dtype)[None], None
    buckets = packing.buckets
    padded = [_padded(x, buckets) for x in (query, key, value)]
    outputs = []
    for bucket in zip(*padded, strict=True):
        q, k, v = (x.to(dtype) for x in bucket)
        with torch.autocast("cpu", enabled=False):
            shares_keys = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shares_keys
            )
        outputs.append(out.reshape(-1, out.shape[-1]).to(query.dtype))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    mixed = take_rows(rows, buckets.of_heads(query.shape[1]).home)
    return mixed.view(1, -1, query.shape[1], value.shape[3]), None


def _padded(x: Tensor, buckets: Buckets) -> list[Tensor]:
    """`(1, heads, tokens, head_dim)` → `(rows, heads, longest, head_dim)` of each bucket."""
    num_heads, _, dim = x.shape[1:]
    rows = spread_rows(x[0].transpose(0, 1).reshape(-1, dim), *buckets.of_heads(num_heads))
    shapes = [(rows, num_heads, longest) for rows, longest in buckets.shapes]
    parts = rows.split([math.prod(shape) for shape in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
