"""Native code for a decoder layer on a CPU, forward and backward.

- Causal attention of packed sequences in float32: each to itself, including shared prefixes,
  without padding and without saving a matrix for the backward pass.
- In float32: the part before attention (norm, projections, rotation) and the part after it (output,
  norm, gated MLP and residuals), as one operation each. Intermediate results stay in the
  processor's cache.
- In bfloat16 or float32: the operations between matrix products computed by torch, each of which
  reads its inputs and writes its outputs once. With bfloat16, forward rounds where autocast does,
  and backward less often.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distflow.models.cpu_kernels.build import ADDRESS, COUNT, address, addresses, call, counts, size
from distflow.models.cpu_kernels.weight_layout import heads_and_norms
from distflow.models.packed_layout import Sequences


class _Packing(ctypes.Structure):
    _fields_ = [
        *addresses("place", "starts", "shared"),
        *counts("sequences", "longest", "heads", "kv_heads", "head_dim"),
        ("scale", ctypes.c_float),
    ]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    """queries: float32 `(rows, heads, head_dim)`; keys and values with their own number of heads.
    scale: of the scores, above 0. Returns a tensor like queries; differentiable once. Raises
    NotNative."""
    return _Attention.apply(
        queries.contiguous(), keys.contiguous(), values.contiguous(), sequences, scale
    )


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float
    ) -> Tensor:
        mixed = torch.empty_like(queries)
        log_sums = queries.new_empty(queries.shape[:2])
        _run_attention("attend", sequences, scale, queries, keys, values, mixed, log_sums)
        ctx.save_for_backward(queries, keys, values, mixed, log_sums)
        ctx.sequences = sequences
        ctx.scale = scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, mixed, log_sums = ctx.saved_tensors
        sequences = ctx.sequences
        of_mixed = of_mixed.contiguous()
        added = [keys.new_empty(len(sequences.place), *keys.shape[1:]) for _ in range(2)]
        of_queries = torch.empty_like(queries)
        others = (mixed, log_sums, of_mixed, of_queries, *added)
        _run_attention("attend_backward", sequences, ctx.scale, queries, keys, values, *others)

        if len(sequences.place) != len(keys):  # some rows belong to several sequences, or to none
            for index, rows in enumerate(added):
                added[index] = torch.zeros_like(keys)
                call("add_rows", sequences.place, len(rows), keys[0].numel(), rows, added[index])

        return of_queries, *added, None, None


def _run_attention(
    name: str, sequences: Sequences, scale: float, queries: Tensor, keys: Tensor, *others: Tensor
) -> None:
    """others: values, and the C function's further arguments."""
    packing = _Packing(
        sequences.place.data_ptr(),
        sequences.starts.data_ptr(),
        sequences.shared.data_ptr(),
        len(sequences.shared),
        sequences.longest,
        queries.shape[1],
        keys.shape[1],
        queries.shape[2],
        scale,
    )
    scratch = torch.empty(torch.get_num_threads() * size("attend_scratch", packing))
    call(name, packing, queries, keys, *others, scratch)


class _Norm(ctypes.Structure):
    _fields_ = [*addresses("weight", "of_weight"), *counts("size"), ("epsilon", ctypes.c_float)]


def _norm(weight: Tensor | None, of_weight: Tensor | None, epsilon: float) -> _Norm:
    size = 0 if weight is None else len(weight)
    return _Norm(address(weight), address(of_weight), size, epsilon)


class _Linear(ctypes.Structure):
    _fields_ = [*addresses("weight", "bias", "of_weight", "of_bias"), *counts("inputs", "outputs")]


class _Projection(ctypes.Structure):
    _fields_ = [
        *(("linear", _Linear), ("norm", _Norm)),
        *addresses("projected", "outputs", "of_outputs"),
        *counts("rotates"),
    ]


class _Before(ctypes.Structure):
    _fields_ = [
        *addresses("x", "of_x", "cos", "sin"),
        *(("norm", _Norm), ("projections", _Projection * 3)),
        *counts("rows", "head_dim"),
    ]


class _After(ctypes.Structure):
    _fields_ = [
        *addresses(
            "x", "mixed", "attended", "gates", "ups", "outputs", "of_outputs", "of_x", "of_mixed"
        ),
        ("norm", _Norm),
        *((name, _Linear) for name in ("output", "gate", "up", "down")),
        *counts("rows"),
    ]


def before_attention(
    layer: Any, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries `(rows, heads, head_dim)`, rotated keys and values
    `(rows, kv_heads, head_dim)`, of a layer that `weight_layout.check_modules` accepts.

    x: float32 `(rows, hidden)`. cos, sin: `(rows, head_dim)`, from the model. Differentiable once.
    """
    attention = layer.self_attn
    norm = layer.input_layernorm

    weights: list[Tensor | None] = []
    for name in ("q", "k", "v"):
        linear = getattr(attention, f"{name}_proj")
        head_norm = getattr(attention, f"{name}_norm", None)
        weights += (linear.weight, linear.bias, None if head_norm is None else head_norm.weight)

    inputs = (each.contiguous() for each in (x, cos, sin))
    outputs = _BeforeAttention.apply(
        *inputs, attention.head_dim, norm.variance_epsilon, norm.weight, *weights
    )
    queries, keys, values = (each.unflatten(1, (-1, attention.head_dim)) for each in outputs)

    return queries, keys, values


def after_attention(layer: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """The layer's output, `(rows, hidden)`, from its input `x` and the output of attention,
    `mixed`, `(rows, heads, head_dim)`. Differentiable once."""
    norm = layer.post_attention_layernorm
    mlp = layer.mlp
    weights = []
    for linear in (layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        weights += [linear.weight, linear.bias]
    keeps = torch.is_grad_enabled()
    inputs = (x.contiguous(), mixed.flatten(1).contiguous())

    return _AfterAttention.apply(*inputs, norm.variance_epsilon, keeps, norm.weight, *weights)


class _BeforeAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_dim: int,
        epsilon: float,
        norm: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs = [x.new_empty(len(x), len(weight)) for weight in weights[::3]]
        projected = [
            None if of_heads is None else torch.empty_like(each)
            for of_heads, each in zip(weights[2::3], outputs, strict=True)
        ]
        tensors = (x, cos, sin, norm, *weights, *projected)
        ctx.save_for_backward(*tensors)
        ctx.head_dim = head_dim
        ctx.epsilon = epsilon
        job = _before(ctx, tensors, [None] * 10)
        for place, each in zip(job.projections, outputs, strict=True):
            place.outputs = each.data_ptr()
        _run("before", job, backward=False)

        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, _, _, norm, *others = ctx.saved_tensors
        of_x = torch.empty_like(x)
        of_weights = [_like(weight) for weight in (norm, *others[:9])]
        job = _before(ctx, ctx.saved_tensors, of_weights)
        gradients = [each.contiguous() for each in of_outputs]
        job.of_x = of_x.data_ptr()
        for place, each in zip(job.projections, gradients, strict=True):
            place.of_outputs = each.data_ptr()
        _run("before", job, backward=True)

        return of_x, None, None, None, None, *of_weights


def _before(ctx: Any, tensors: Sequence[Any], of_weights: Sequence[Tensor | None]) -> Any:
    x, cos, sin, norm, *others = tensors
    weights = others[:9]
    projected = others[9:]
    of_norm, *of_others = of_weights

    job = _Before(
        x.data_ptr(), None, cos.data_ptr(), sin.data_ptr(), _norm(norm, of_norm, ctx.epsilon)
    )
    for index, place in enumerate(job.projections):
        own = weights[3 * index : 3 * index + 3]
        of_own = of_others[3 * index : 3 * index + 3]
        place.linear = _linear(own[:2], of_own[:2])
        place.norm = _norm(own[2], of_own[2], ctx.epsilon)
        place.projected = address(projected[index])
        place.rotates = index < 2

    job.rows = len(x)
    job.head_dim = ctx.head_dim
    return job


class _AfterAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mixed: Tensor,
        epsilon: float,
        keeps: bool,
        norm: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        attended = torch.empty_like(x)
        outputs = torch.empty_like(x)
        stride = size("gates_stride", len(weights[2]))
        gates, ups = ((x.new_empty(len(x), stride) if keeps else None) for _ in range(2))
        tensors = (mixed, attended, gates, ups, norm, *weights)
        ctx.save_for_backward(*tensors)
        ctx.epsilon = epsilon
        job = _after(ctx, tensors, [None] * 9)
        job.x = x.data_ptr()
        job.outputs = outputs.data_ptr()
        _run("after", job, backward=False)

        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        mixed, attended, _, _, *weights = ctx.saved_tensors
        of_x = torch.empty_like(attended)
        of_mixed = torch.empty_like(mixed)
        of_weights = [_like(w) for w in weights]
        job = _after(ctx, ctx.saved_tensors, of_weights)
        of_outputs = of_outputs.contiguous()
        job.of_outputs = of_outputs.data_ptr()
        job.of_x = of_x.data_ptr()
        job.of_mixed = of_mixed.data_ptr()
        _run("after", job, backward=True)

        return of_x, of_mixed, None, None, *of_weights


def _after(ctx: Any, tensors: Sequence[Any], of_weights: Sequence[Tensor | None]) -> Any:
    mixed, attended, gates, ups, norm, *weights = tensors
    of_norm, *of_others = of_weights
    job = _After(norm=_norm(norm, of_norm, ctx.epsilon), rows=len(attended))
    job.mixed = address(mixed)
    job.attended = address(attended)
    job.gates = address(gates)
    job.ups = address(ups)

    for index, name in enumerate(("output", "gate", "up", "down")):
        own = slice(2 * index, 2 * index + 2)
        setattr(job, name, _linear(weights[own], of_others[own]))

    return job


def _linear(own: Sequence[Tensor | None], of_own: Sequence[Tensor | None]) -> _Linear:
    # a bias may be missing, a weight never
    outputs, inputs = own[0].shape  # type: ignore[union-attr]
    return _Linear(*(address(each) for each in (*own, *of_own)), inputs, outputs)


def _like(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else torch.empty_like(weight)


def _run(name: str, job: Any, *, backward: bool) -> None:
    scratch = torch.empty(size(f"{name}_scratch", job, backward, torch.get_num_threads()))
    call(f"{name}_attention_backward" if backward else f"{name}_attention", job, scratch)


class _Heads(ctypes.Structure):
    _fields_ = [("norms", _Norm * 2), ("heads", COUNT * 3), *counts("head_dim")]


def add_norm(
    x: Tensor, added: Tensor | None, norm: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + added in float32, and its norm in the products' dtype. x: float32 `(rows, hidden)`;
    added: a product, or None for zeros. Differentiable once, like everything here."""
    return _AddNorm.apply(x.contiguous(), added, norm.weight, norm.variance_epsilon, dtype)


def split_heads(
    projected: Tensor, cos: Tensor, sin: Tensor, attention: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries, rotated keys and values, all float32
    `(rows, heads of each, head_dim)`.

    projected: a product, `(rows, all heads · head_dim)`, in this order. cos, sin: float32
    `(rows, head_dim)`."""
    return _SplitHeads.apply(
        projected, cos.contiguous(), sin.contiguous(), *heads_and_norms(attention)
    )


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, `(rows, size)`. gate_up: a product, `(rows, 2 · size)`, gates first."""
    return _Gate.apply(gate_up)


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
        normed = torch.empty_like(x, dtype=dtype)
        norm = _norm(weight, None, epsilon)
        call("add_norm", norm, x, added, len(x), dtype == torch.bfloat16, outputs, normed)
        ctx.save_for_backward(outputs, weight)
        ctx.epsilon = epsilon
        return outputs, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weight = ctx.saved_tensors
        of_x = torch.empty_like(outputs)
        of_weight = torch.empty_like(weight)

        of_added = None
        if ctx.needs_input_grad[1]:
            of_added = torch.empty_like(of_normed)

        norm = _norm(weight, of_weight, ctx.epsilon)
        sums = weight.new_empty(torch.get_num_threads(), len(weight))
        given = (outputs, of_outputs.contiguous(), of_normed.contiguous(), len(outputs))
        call(
            "add_norm_backward",
            norm,
            *given,
            of_normed.dtype == torch.bfloat16,
            of_x,
            of_added,
            sums,
        )

        return of_x, of_added, of_weight, None, None


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
            cos.new_empty(rows, heads, dim) for heads in (num_heads, num_kv_heads, num_kv_heads)
        ]
        heads = _heads(outputs, epsilon, norms, (None, None))
        halves = projected.dtype == torch.bfloat16
        call("split_heads", heads, projected, cos, sin, rows, halves, _addresses(outputs))
        ctx.save_for_backward(projected if norms[0] is not None else None, cos, sin, *norms)
        ctx.epsilon = epsilon
        ctx.dtype = projected.dtype

        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        projected, cos, sin, *norms = ctx.saved_tensors
        rows, dim = cos.shape
        of_norms = [None if norm is None else torch.empty_like(norm) for norm in norms]
        operands = [each.contiguous() for each in of_outputs]
        heads = _heads(operands, ctx.epsilon, norms, of_norms)
        of_projected = cos.new_empty(
            rows, sum(each.shape[1] for each in operands) * dim, dtype=ctx.dtype
        )
        sums = cos.new_empty(torch.get_num_threads(), 2, dim)
        others = (ctx.dtype == torch.bfloat16, _addresses(operands), of_projected, sums)
        call("split_heads_backward", heads, projected, cos, sin, rows, *others)

        return of_projected, None, None, None, None, *of_norms


def _heads(
    outputs: Sequence[Tensor],
    epsilon: float,
    norms: Sequence[Tensor | None],
    of_norms: Sequence[Tensor | None],
) -> _Heads:
    weights = zip(norms, of_norms, strict=True)
    return _Heads(
        (_Norm * 2)(*(_norm(*each, epsilon) for each in weights)),
        (COUNT * 3)(*(each.shape[1] for each in outputs)),
        outputs[0].shape[2],
    )


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ADDRESS * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = len(gate_up)
        width = gate_up.shape[1] // 2
        gated = gate_up.new_empty(rows, width)
        call("gate_rows", gate_up, rows, width, gate_up.dtype == torch.bfloat16, gated)
        ctx.save_for_backward(gate_up)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gated: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        halves = gate_up.dtype == torch.bfloat16
        of_gate_up = torch.empty_like(gate_up)
        call(
            "gate_rows_backward",
            gate_up,
            of_gated.contiguous(),
            *of_gated.shape,
            halves,
            of_gate_up,
        )

        return of_gate_up
