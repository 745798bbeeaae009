"""A decode step of Llama-like models on a CUDA device, with kernels in Triton between the products
with weights.

A step of single operations is some thirty-five kernels per layer, each of a few microseconds. Here
it is thirteen: seven products by the module's own projections (so LoRA layers and replaced
submodules work), and ours:

- residual sum and norm (`add_norm`), twice,
- the rotation of queries and keys, the write to the paged memory, and attention over pages in place
  (`attend`): every 256 tokens of a row have their own instance (FlashDecoding), and a row's bits
  depend only on that row,
- the gate of the MLP (`silu_mul`).

Sums are in float32; results are rounded where `transformers` rounds them.
"""

import functools
import logging
import subprocess
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from distflow.models.cpu_kernels.build import NotNative
from distflow.models.cpu_kernels.weight_layout import is_plain

_log = logging.getLogger(__name__)

SPLIT_TOKENS = 256
"""Tokens of a row's keys and values that one instance reads."""
GATE_BLOCK = 1024
"""Columns of a gate that one instance computes."""
PRODUCT_ROWS = 16
"""The fewest rows of a product in Triton: query heads of a key-value head are padded to it."""


class PagedStep:
    """A decode step over pages. Raises NotNative for a model or machine that it does not
    support."""

    def __init__(self, causal: Any, low: torch.dtype | None) -> None:
        """low: dtype of products with weights, if it is not that of the weights."""
        config = causal.config
        self._body = causal.model
        self._head_dim: int = self._body.layers[0].self_attn.head_dim
        self._low = low
        if self._head_dim not in (32, 64, 128, 256):
            raise NotNative(f"heads of {self._head_dim} numbers have no kernel")
        if config.hidden_act != "silu":
            raise NotNative(f"the activation {config.hidden_act} has no kernel")

        parts = [(self._body.norm, "RMSNorm")]
        for layer in self._body.layers:
            parts.append((layer.input_layernorm, "RMSNorm"))
            parts.append((layer.post_attention_layernorm, "RMSNorm"))
            parts.append((layer.mlp, "MLP"))

        for part, kind in parts:
            if not is_plain(part, kind):
                raise NotNative(f"{type(part).__name__} has hooks, or is not that of transformers")

        try_to_compile(self._body.norm.weight.device)

    def decode(
        self,
        hidden: Tensor,
        positions: Tensor,
        rotary: tuple[Tensor, Tensor],
        tables: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """hidden: `(rows, hidden)`, the tokens' embeddings, which are overwritten; positions:
        `(rows,)`, where the tokens' keys and values are written. rotary: `(positions, head_dim)`
        each, cosines and sines; the first half of the sines is negative. tables: `(rows, width)`,
        the pages of each row. keys, values: `(layers, pages, kv_heads, page_tokens, head_dim)`.
        Returns `(rows, hidden)` after the final norm."""
        narrow = self._low or hidden.dtype
        delta: Tensor | None = None
        for index, layer in enumerate(self._body.layers):
            attention = layer.self_attn
            mlp = layer.mlp
            normed = self._norm(layer.input_layernorm, hidden, delta, narrow)
            query, key, value = (
                project(normed).unflatten(-1, (-1, self._head_dim))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )

            if hasattr(attention, "q_norm") and hasattr(attention, "k_norm"):
                query = self._norm(attention.q_norm, query, None, query.dtype)
                key = self._norm(attention.k_norm, key, None, key.dtype)

            scaling = attention.scaling
            mixed = attend(
                query, key, value, keys[index], values[index], tables, positions, rotary, scaling
            )
            delta = attention.o_proj(mixed.flatten(1))
            normed = self._norm(layer.post_attention_layernorm, hidden, delta, narrow)
            delta = mlp.down_proj(silu_mul(mlp.gate_proj(normed), mlp.up_proj(normed)))

        return self._norm(self._body.norm, hidden, delta, narrow)

    def _norm(
        self, module: Any, hidden: Tensor, delta: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return add_norm(hidden, delta, module.weight, module.variance_epsilon, dtype)


@functools.cache
def try_to_compile(device: torch.device) -> None:
    """Raises NotNative, with a warning, if Triton cannot compile, e.g. for lack of a C compiler."""
    try:
        add_norm(
            torch.ones(1, 16, device=device),
            None,
            torch.ones(16, device=device),
            1e-6,
            torch.float32,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        reason = f"Triton cannot compile here: {str(error).strip()[:200]}"
        _log.warning(
            "the device computes by torch's kernels alone, at about half the speed: %s", reason
        )
        raise NotNative(reason) from error


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Add `delta` to `hidden` in place; returns RMSNorm of the sum, over the last dimension, in
    `dtype`."""
    hidden = hidden.contiguous() if delta is None else hidden
    return add_norm_rows(hidden, delta, hidden, weight, epsilon, dtype)


def add_norm_rows(
    hidden: Tensor,
    delta: Tensor | None,
    total: Tensor,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    """As `add_norm`; the sum is written to `total`, which may be `hidden`."""
    width = hidden.shape[-1]
    normed = torch.empty_like(hidden, dtype=dtype)
    rows = hidden.numel() // width
    block = triton.next_power_of_2(width)
    added = hidden if delta is None else delta
    shape = (epsilon, width, block, delta is not None, delta is not None or total is not hidden)
    _add_norm[(rows,)](hidden, added, total, weight, normed, *shape, num_warps=num_warps(block))

    return normed


def num_warps(block: int) -> int:
    """Warps of an instance that handles this many elements of a row."""
    return min(16, max(1, block // 256))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, both `(rows, width)`: separate matrices, or halves of the columns of
    one."""
    rows, width = gate.shape
    result = gate.new_empty(gate.shape)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _silu_mul[grid](gate, up, result, width, gate.stride(0), up.stride(0), GATE_BLOCK)
    return result


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    rotary: tuple[Tensor, Tensor],
    scaling: float,
) -> Tensor:
    """Rotate queries `(rows, heads, head_dim)` and keys `(rows, kv_heads, head_dim)`, write keys
    and values to the page of each row's position, and attend to all positions up to it. keys,
    values: `(pages, kv_heads, page_tokens, head_dim)`; the others: see `PagedStep.decode`. Returns
    `(rows, heads, head_dim)` in the dtype of the memory."""
    rows, heads, head_dim = query.shape
    _, kv_heads, page_tokens, _ = keys.shape
    split_pages = max(1, SPLIT_TOKENS // page_tokens)
    splits = triton.cdiv(tables.shape[1], split_pages)
    out = torch.empty(rows, heads, head_dim, dtype=keys.dtype, device=keys.device)

    # The sums of a row's parts, followed by its largest score and its sum of weights.
    parts = out
    if splits > 1:
        parts = out.new_empty(rows, heads, splits, head_dim + 2, dtype=torch.float32)
    cos, sin = rotary
    group = heads // kv_heads
    _attend[(rows, kv_heads, splits)](
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        keys,
        values,
        tables,
        positions,
        cos,
        sin,
        parts,
        scaling,
        tables.stride(0),
        splits,
        kv_heads,
        group,
        max(PRODUCT_ROWS, triton.next_power_of_2(group)),
        head_dim,
        page_tokens,
        split_pages,
        splits == 1,
        "ieee" if keys.dtype == torch.float32 else "tf32",
        num_warps=4,
    )

    if splits > 1:
        block = triton.next_power_of_2(splits)
        _join[(rows, heads)](
            parts, out, positions, splits, heads, head_dim, block, split_pages * page_tokens
        )

    return out


@triton.jit
def _add_norm(
    hidden,
    delta,
    total,
    weight,
    normed,
    epsilon,
    width,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    WRITES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns

    stream = tl.load(hidden + at, mask=inside, other=0.0)
    if HAS_DELTA:
        stream = (
            stream.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        ).to(stream.dtype)

    if WRITES:
        tl.store(total + at, stream, mask=inside)
    numbers = stream.to(tl.float32)
    scaled = (numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)).to(stream.dtype)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    result = scale.to(tl.float32) * scaled.to(tl.float32)
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate, up, result, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    given = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    numbers = given.to(tl.float32)
    opened = (numbers / (1.0 + tl.exp(-numbers))).to(given.dtype).to(tl.float32)
    gated = opened * tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + columns, gated.to(given.dtype), mask=inside)


@triton.jit
def _rotated(x, cos, sin, mask, HALF: tl.constexpr, kind: tl.constexpr):
    """Rotate both halves x and y of heads, which are HALF apart: x cos + y sin and y cos + x sin;
    see `rotary`."""
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    first_cos = tl.load(cos).to(tl.float32)
    first_sin = tl.load(sin).to(tl.float32)
    second_cos = tl.load(cos + HALF).to(tl.float32)
    second_sin = tl.load(sin + HALF).to(tl.float32)

    return (first * first_cos + second * first_sin).to(kind), (
        second * second_cos + first * second_sin
    ).to(kind)


@triton.jit
def _attend(
    query,
    key,
    value,
    keys,
    values,
    tables,
    positions,
    cos,
    sin,
    out,
    scaling,
    table_width,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of the cached tokens, for one row and all query heads of one key head.

    Softmax runs over one page at a time: `largest`, `total` and `mixed` are the largest score, the
    sum of exponentials and the weighted sum of values so far, by query head. The row's own token
    is not in the cache yet, so its key and value take the place of what is read there, and the
    split that it belongs to stores them.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row)
    first_page = split * SPLIT_PAGES
    if first_page * PAGE > position:
        return

    half_dims = tl.arange(0, HALF)
    dims = tl.arange(0, HEAD_DIM)
    tokens = tl.arange(0, PAGE)
    group = tl.arange(0, ROWS)
    kept = keys.dtype.element_ty

    # the new token's queries, (ROWS, HALF) twice, and its key and value
    head = (row * KV_HEADS + kv_head) * GROUP + group
    is_head = (group < GROUP)[:, None]
    angle = position * HEAD_DIM + half_dims
    angles = tl.broadcast_to(angle[None, :], (ROWS, HALF))
    query_1, query_2 = _rotated(
        query + head[:, None] * HEAD_DIM + half_dims[None, :],
        cos + angles,
        sin + angles,
        is_head,
        HALF,
        kept,
    )
    own = (row * KV_HEADS + kv_head) * HEAD_DIM
    new_key_1, new_key_2 = _rotated(
        key + own + half_dims, cos + angle, sin + angle, half_dims < HALF, HALF, kept
    )
    new_value = tl.load(value + own + dims).to(kept)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for number in range(SPLIT_PAGES):
        begin = (first_page + number) * PAGE
        page = tl.load(
            tables + row * table_width + first_page + number, mask=begin <= position, other=0
        )
        page_start = (page * KV_HEADS + kv_head) * PAGE * HEAD_DIM
        is_seen = begin + tokens <= position
        is_new = begin + tokens == position

        # scores, (ROWS, PAGE), of keys that are read transposed, (HALF, PAGE) twice
        at = keys + page_start + tokens[None, :] * HEAD_DIM + half_dims[:, None]
        cached = tl.load(at, mask=is_seen[None, :], other=0.0)
        keys_1 = tl.where(is_new[None, :], new_key_1[:, None], cached)
        cached = tl.load(at + HALF, mask=is_seen[None, :], other=0.0)
        keys_2 = tl.where(is_new[None, :], new_key_2[:, None], cached)
        scores = tl.dot(query_1, keys_1, input_precision=PRECISION)
        scores = tl.dot(query_2, keys_2, scores, input_precision=PRECISION) * scaling
        scores = tl.where(is_seen[None, :], scores, float("-inf"))

        # what was summed so far is scaled to the new largest score
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - above[:, None])
        shrunk = tl.exp(largest - above)
        total = total * shrunk + tl.sum(weights, 1)
        largest = above

        at = values + page_start + tokens[:, None] * HEAD_DIM + dims[None, :]
        cached = tl.load(at, mask=is_seen[:, None], other=0.0)
        page_values = tl.where(is_new[:, None], new_value[None, :], cached)
        mixed = tl.dot(
            weights.to(kept), page_values, mixed * shrunk[:, None], input_precision=PRECISION
        )

    if (first_page + SPLIT_PAGES) * PAGE > position:  # the row's own token is in this split
        page = tl.load(tables + row * table_width + position // PAGE)
        place = ((page * KV_HEADS + kv_head) * PAGE + position % PAGE) * HEAD_DIM
        tl.store(keys + place + half_dims, new_key_1)
        tl.store(keys + place + HALF + half_dims, new_key_2)
        tl.store(values + place + dims, new_value)

    if IS_WHOLE:
        result = (mixed / total[:, None]).to(kept)
        tl.store(out + head[:, None] * HEAD_DIM + dims[None, :], result, mask=is_head)
    else:
        part = out + (head * num_splits + split) * (HEAD_DIM + 2)
        tl.store(part[:, None] + dims[None, :], mixed, mask=is_head)
        tl.store(part + HEAD_DIM, largest, mask=group < GROUP)
        tl.store(part + HEAD_DIM + 1, total, mask=group < GROUP)


@triton.jit
def _join(
    parts,
    out,
    positions,
    num_splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK)
    whole = tl.arange(0, HEAD_DIM)
    is_there = splits * SPLIT <= tl.load(positions + row)
    part = parts + ((row * HEADS + head) * num_splits + splits) * (HEAD_DIM + 2)
    largest = tl.load(part + HEAD_DIM, mask=is_there, other=float("-inf"))
    total = tl.load(part + HEAD_DIM + 1, mask=is_there, other=0.0)
    mixed = tl.load(part[:, None] + whole[None, :], mask=is_there[:, None], other=0.0)
    shares = tl.exp(largest - tl.max(largest, 0))
    result = tl.sum(mixed * shares[:, None], 0) / tl.sum(total * shares, 0)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + whole, result.to(out.dtype.element_ty))
