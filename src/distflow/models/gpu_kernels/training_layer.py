"""The operations between the matrix products of a decoder layer on a CUDA device, forward and
backward: the functions of `cpu_kernels/training_layer.py` by the same names. Each reads its inputs
and writes its outputs once.

Single operations move a layer's activations some fifty times, which takes more of a small model's
update than the products. Forward rounds where autocast does, and backward less often. Sums are in
float32, always in the same order."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distflow.models.cpu_kernels.weight_layout import heads_and_norms
from distflow.models.gpu_kernels.decode_step import GATE_BLOCK, add_norm_rows, num_warps, silu_mul

INSTANCES = 512
"""Instances of a backward pass that sums over rows: each sums its own rows."""
_TILE = 16  # rows of one head that are rotated together


def add_norm(
    x: Tensor, added: Tensor | None, norm: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + added in float32, and its norm in the products' dtype. x: float32 `(rows, hidden)`;
    added: a product, or None for zeros. Differentiable once, like everything here."""
    return _AddNorm.apply(x.contiguous(), added, norm.weight, norm.variance_epsilon, dtype)


def split_heads(
    projected: Tensor, cos: Tensor, sin: Tensor, attention: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries, rotated keys, and values, `(rows, heads of each, head_dim)`, in
    the dtype of `projected`, a product, `(rows, all heads · head_dim)`, in this order. cos, sin:
    float32 `(rows, head_dim)`."""
    rows = (projected.contiguous(), cos.contiguous(), sin.contiguous())
    return _SplitHeads.apply(*rows, *heads_and_norms(attention))


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, `(rows, size)`. gate_up: a product, `(rows, 2 · size)`, gates first."""
    return _Gate.apply(gate_up.contiguous())


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        epsilon: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        outputs = torch.empty_like(x)
        normed = add_norm_rows(x, added, outputs, weight, epsilon, dtype)
        ctx.save_for_backward(outputs, weight)
        ctx.epsilon = epsilon
        ctx.added_dtype = None if added is None else added.dtype
        return outputs, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weight = ctx.saved_tensors
        rows, width = outputs.shape
        of_x = torch.empty_like(outputs)
        instances = min(INSTANCES, rows)

        if ctx.added_dtype is None:
            of_added = of_x
        else:
            of_added = torch.empty_like(of_x, dtype=ctx.added_dtype)

        sums = outputs.new_empty(instances, width)
        block = triton.next_power_of_2(width)
        given = (outputs, weight, of_outputs.contiguous(), of_normed.contiguous())
        shape = (rows, instances, ctx.epsilon, width, block, ctx.added_dtype is not None)
        _add_norm_backward[(instances,)](
            *given, of_x, of_added, sums, *shape, num_warps=num_warps(block)
        )
        of_weight = sums.sum(0).to(weight.dtype)

        return of_x, None if ctx.added_dtype is None else of_added, of_weight, None, None


class _SplitHeads(Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_kv_heads: int,
        epsilon: float,
        *norms: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows, dim = cos.shape
        num_heads = projected.shape[1] // dim - 2 * num_kv_heads
        outputs = [
            projected.new_empty(rows, heads, dim)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        ]
        weights = [cos if norm is None else norm for norm in norms]  # a missing norm is not read
        grid = (triton.cdiv(rows, _TILE), num_heads + 2 * num_kv_heads)
        shape = (rows, epsilon, num_heads, num_kv_heads, dim, _TILE, norms[0] is not None)
        _split_heads[grid](projected, cos, sin, *weights, *outputs, *shape)
        ctx.save_for_backward(projected if norms[0] is not None else None, cos, sin, *norms)
        ctx.epsilon = epsilon
        ctx.dtype = projected.dtype

        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        projected, cos, sin, *norms = ctx.saved_tensors
        rows, dim = cos.shape
        num_heads, num_kv_heads, _ = (each.shape[1] for each in of_outputs)
        all_heads = num_heads + 2 * num_kv_heads
        of_projected = cos.new_empty(rows, all_heads * dim, dtype=ctx.dtype)
        has_norms = norms[0] is not None
        instances = min(INSTANCES // 4, triton.cdiv(rows, _TILE))

        sums = cos
        if has_norms:
            sums = cos.new_empty(instances, all_heads, dim)

        weights = norms if has_norms else [cos, cos]
        given = (
            projected if has_norms else of_projected,
            cos,
            sin,
            *weights,
            *(each.contiguous() for each in of_outputs),
        )
        shape = (rows, instances, ctx.epsilon, num_heads, num_kv_heads, dim, _TILE, has_norms)
        _split_heads_backward[(instances, all_heads)](*given, of_projected, sums, *shape)

        of_norms: list[Tensor | None] = [None, None]
        if has_norms:
            parts = sums.split((num_heads, num_kv_heads, num_kv_heads), 1)
            of_norms = [
                part.sum((0, 1)).to(norm.dtype) for part, norm in zip(parts[:2], norms, strict=True)
            ]

        return of_projected, None, None, None, None, *of_norms


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return silu_mul(*gate_up.chunk(2, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gated: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, width = of_gated.shape
        of_gate_up = torch.empty_like(gate_up)
        grid = (rows, triton.cdiv(width, GATE_BLOCK))
        _gate_backward[grid](gate_up, of_gated.contiguous(), of_gate_up, width, GATE_BLOCK)
        return of_gate_up


@triton.jit
def _add_norm_backward(
    outputs,
    weight,
    of_outputs,
    of_normed,
    of_x,
    of_added,
    sums,
    rows,
    instances,
    epsilon,
    width,
    BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    instance = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)

    total = tl.zeros([BLOCK], tl.float32)
    row = instance
    while row < rows:
        at = row.to(tl.int64) * width + columns
        numbers = tl.load(outputs + at, mask=inside, other=0.0)
        given = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)
        unit = numbers * inverse
        scaled = given * scale
        total += given * unit
        result = inverse * (scaled - unit * (tl.sum(scaled * unit, 0) / width))
        result += tl.load(of_outputs + at, mask=inside, other=0.0)
        tl.store(of_x + at, result, mask=inside)
        if HAS_ADDED:
            tl.store(of_added + at, result.to(of_added.dtype.element_ty), mask=inside)
        row += instances

    tl.store(sums + instance * width + columns, total, mask=inside)


@triton.jit
def _pair(place, mask, HALF: tl.constexpr):
    """The elements at `place` and HALF after it, in float32."""
    first = tl.load(place, mask=mask, other=0.0)
    second = tl.load(place + HALF, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _head_rows(
    queries,
    keys,
    values,
    tile,
    head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Where a head of the rows `tile` begins in queries, keys or values; heads are counted over all
    three."""
    if head < HEADS:
        rows = queries + (tile * HEADS + head) * DIM
    elif head < HEADS + KV_HEADS:
        rows = keys + (tile * KV_HEADS + head - HEADS) * DIM
    else:
        rows = values + (tile * KV_HEADS + head - HEADS - KV_HEADS) * DIM

    return rows[:, None]


@triton.jit
def _split_heads(
    projected,
    cos,
    sin,
    query_norm,
    key_norm,
    queries,
    keys,
    values,
    rows,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    tile = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    low = tl.arange(0, HALF)
    inside = (tile < rows)[:, None]
    source = projected + (tile * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + low[None, :]

    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        x = first.to(tl.float32)
        y = second.to(tl.float32)
        if HAS_NORMS:
            norm = key_norm
            if head < HEADS:
                norm = query_norm
            inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + epsilon)[:, None]
            x = (x * inverse).to(first.dtype).to(tl.float32)
            y = (y * inverse).to(first.dtype).to(tl.float32)
            x *= tl.load(norm + low).to(tl.float32)[None, :]
            y *= tl.load(norm + HALF + low).to(tl.float32)[None, :]

        angle = tile[:, None] * DIM + low[None, :]
        cos_x, cos_y = _pair(cos + angle, inside, HALF)
        sin_x, sin_y = _pair(sin + angle, inside, HALF)
        first = (x * cos_x - y * sin_x).to(first.dtype)
        second = (y * cos_y + x * sin_y).to(first.dtype)

    place = _head_rows(queries, keys, values, tile, head, HEADS, KV_HEADS, DIM) + low[None, :]
    tl.store(place, first, mask=inside)
    tl.store(place + HALF, second, mask=inside)


@triton.jit
def _split_heads_backward(
    projected,
    cos,
    sin,
    query_norm,
    key_norm,
    of_queries,
    of_keys,
    of_values,
    of_projected,
    sums,
    rows,
    instances,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """The transpose of the rotation, and the norm's gradient."""
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    instance = tl.program_id(0)
    head = tl.program_id(1)
    low = tl.arange(0, HALF)
    kind = projected.dtype.element_ty
    total_x = tl.zeros([HALF], tl.float32)
    total_y = tl.zeros([HALF], tl.float32)
    norm = key_norm
    if head < HEADS:
        norm = query_norm

    start = instance * TILE
    while start < rows:
        tile = start.to(tl.int64) + tl.arange(0, TILE)
        inside = (tile < rows)[:, None]
        at = (tile * ALL + head)[:, None] * DIM + low[None, :]
        given = _head_rows(of_queries, of_keys, of_values, tile, head, HEADS, KV_HEADS, DIM)

        back_x, back_y = _pair(given + low[None, :], inside, HALF)
        if head < HEADS + KV_HEADS:
            angle = tile[:, None] * DIM + low[None, :]
            cos_x, cos_y = _pair(cos + angle, inside, HALF)
            sin_x, sin_y = _pair(sin + angle, inside, HALF)

            of_x = back_x * cos_x + back_y * sin_y
            of_y = back_y * cos_y - back_x * sin_x
            if HAS_NORMS:
                own_x, own_y = _pair(projected + at, inside, HALF)
                squares = tl.sum(own_x * own_x, 1) + tl.sum(own_y * own_y, 1)
                inverse = tl.rsqrt(squares / DIM + epsilon)[:, None]
                unit_x = own_x * inverse
                unit_y = own_y * inverse
                total_x += tl.sum(of_x * unit_x, 0)
                total_y += tl.sum(of_y * unit_y, 0)
                of_x *= tl.load(norm + low).to(tl.float32)[None, :]
                of_y *= tl.load(norm + HALF + low).to(tl.float32)[None, :]
                mean = ((tl.sum(of_x * unit_x, 1) + tl.sum(of_y * unit_y, 1)) / DIM)[:, None]
                of_x = inverse * (of_x - unit_x * mean)
                of_y = inverse * (of_y - unit_y * mean)

            back_x = of_x
            back_y = of_y

        tl.store(of_projected + at, back_x.to(kind), mask=inside)
        tl.store(of_projected + at + HALF, back_y.to(kind), mask=inside)
        start += instances * TILE

    if HAS_NORMS:
        place = sums + (instance * ALL + head) * DIM + low
        tl.store(place, total_x)
        tl.store(place + HALF, total_y)


@triton.jit
def _gate_backward(gate_up, of_gated, of_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * 2 * width + columns
    given = tl.load(gate_up + at, mask=inside, other=0.0)
    x = given.to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    back = tl.load(of_gated + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-x))
    tl.store(
        of_gate_up + at,
        (back * up * share * (1.0 + x * (1.0 - share))).to(given.dtype),
        mask=inside,
    )
    tl.store(of_gate_up + at + width, (back * x * share).to(given.dtype), mask=inside)
