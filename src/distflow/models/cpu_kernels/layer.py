"""Native code for a decoder layer without its attention, in float32 on a CPU: the part before attention (norm,
projections, rotation) and the part after it (output, norm, gated MLP and residuals), as one operation each, forward and
backward. Intermediate results stay in the processor's cache."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distflow.models.cpu_kernels.build import ADDRESS, COUNT, Norm, address, library, norm_of


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ADDRESS) for name in ("weight", "bias", "of_weight", "of_bias")),
        *((name, COUNT) for name in ("inputs", "outputs")),
    ]


class _Projection(ctypes.Structure):
    _fields_ = [
        *(("linear", _Linear), ("norm", Norm)),
        *((name, ADDRESS) for name in ("projected", "outputs", "of_outputs")),
        ("rotates", COUNT),
    ]


class _Before(ctypes.Structure):
    _fields_ = [
        *((name, ADDRESS) for name in ("x", "of_x", "cos", "sin")),
        *(("norm", Norm), ("projections", _Projection * 3)),
        *((name, COUNT) for name in ("rows", "head_dim")),
    ]


class _After(ctypes.Structure):
    _fields_ = [
        *(
            (name, ADDRESS)
            for name in ("x", "mixed", "attended", "gates", "ups", "outputs", "of_outputs", "of_x", "of_mixed")
        ),
        ("norm", Norm),
        *((name, _Linear) for name in ("output", "gate", "up", "down")),
        ("rows", COUNT),
    ]


def before_attention(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries `(rows, heads, head_dim)`, rotated keys and values `(rows, kv_heads, head_dim)`, of a layer that
    `weight_layout.check_modules` accepts.

    x: float32 `(rows, hidden)`. cos, sin: `(rows, head_dim)`, as the model makes them. Differentiable once.
    """
    attention, norm = layer.self_attn, layer.input_layernorm
    weights: list[Tensor | None] = []
    for name in ("q", "k", "v"):
        linear, head_norm = getattr(attention, f"{name}_proj"), getattr(attention, f"{name}_norm", None)
        weights += (linear.weight, linear.bias, None if head_norm is None else head_norm.weight)
    outputs = _BeforeAttention.apply(
        x.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        attention.head_dim,
        norm.variance_epsilon,
        norm.weight,
        *weights,
    )
    queries, keys, values = (each.unflatten(1, (-1, attention.head_dim)) for each in outputs)
    return queries, keys, values


def after_attention(layer: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """The layer's output, `(rows, hidden)`, from its input `x` and the output of attention, `mixed`, `(rows, heads,
    head_dim)`. Differentiable once."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    weights = [
        weight
        for linear in (layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for weight in (linear.weight, linear.bias)
    ]
    outputs: Tensor = _AfterAttention.apply(
        x.contiguous(),
        mixed.flatten(1).contiguous(),
        norm.variance_epsilon,
        torch.is_grad_enabled(),
        norm.weight,
        *weights,
    )
    return outputs


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
        ctx.head_dim, ctx.epsilon = head_dim, epsilon
        job = _before(ctx, tensors, [None] * 10)
        for place, each in zip(job.projections, outputs, strict=True):
            place.outputs = each.data_ptr()
        _run("before", job, backward=False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, _, _, norm, *others = ctx.saved_tensors
        of_x, of_weights = torch.empty_like(x), [_like(weight) for weight in (norm, *others[:9])]
        job, gradients = _before(ctx, ctx.saved_tensors, of_weights), [each.contiguous() for each in of_outputs]
        job.of_x = of_x.data_ptr()
        for place, each in zip(job.projections, gradients, strict=True):
            place.of_outputs = each.data_ptr()
        _run("before", job, backward=True)
        return of_x, None, None, None, None, *of_weights


def _before(ctx: Any, tensors: Sequence[Any], of_weights: Sequence[Tensor | None]) -> Any:
    x, cos, sin, norm, *others = tensors
    weights, projected = others[:9], others[9:]
    of_norm, *of_others = of_weights
    job = _Before(x.data_ptr(), None, cos.data_ptr(), sin.data_ptr(), norm_of(norm, of_norm, ctx.epsilon))
    for index, place in enumerate(job.projections):
        own, of_own = weights[3 * index : 3 * index + 3], of_others[3 * index : 3 * index + 3]
        place.linear = _linear(own[:2], of_own[:2])
        place.norm = norm_of(own[2], of_own[2], ctx.epsilon)
        place.projected, place.rotates = address(projected[index]), index < 2
    job.rows, job.head_dim = len(x), ctx.head_dim
    return job


class _AfterAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mixed: Tensor, epsilon: float, keeps: bool, norm: Tensor, *weights: Tensor
    ) -> Tensor:
        attended, outputs = torch.empty_like(x), torch.empty_like(x)
        stride = library().gates_stride(COUNT(len(weights[2])))
        gates, ups = ((x.new_empty(len(x), stride) if keeps else None) for _ in range(2))
        tensors = (mixed, attended, gates, ups, norm, *weights)
        ctx.save_for_backward(*tensors)
        ctx.epsilon = epsilon
        job = _after(ctx, tensors, [None] * 9)
        job.x, job.outputs = x.data_ptr(), outputs.data_ptr()
        _run("after", job, backward=False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        mixed, attended, _, _, *weights = ctx.saved_tensors
        of_x, of_mixed, of_weights = torch.empty_like(attended), torch.empty_like(mixed), [_like(w) for w in weights]
        job, of_outputs = _after(ctx, ctx.saved_tensors, of_weights), of_outputs.contiguous()
        job.of_outputs, job.of_x, job.of_mixed = (each.data_ptr() for each in (of_outputs, of_x, of_mixed))
        _run("after", job, backward=True)
        return of_x, of_mixed, None, None, *of_weights


def _after(ctx: Any, tensors: Sequence[Any], of_weights: Sequence[Tensor | None]) -> Any:
    mixed, attended, gates, ups, norm, *weights = tensors
    of_norm, *of_others = of_weights
    job = _After(norm=norm_of(norm, of_norm, ctx.epsilon), rows=len(attended))
    job.mixed, job.attended, job.gates, job.ups = (address(each) for each in (mixed, attended, gates, ups))
    for index, name in enumerate(("output", "gate", "up", "down")):
        setattr(job, name, _linear(weights[2 * index : 2 * index + 2], of_others[2 * index : 2 * index + 2]))
    return job


def _linear(own: Sequence[Tensor | None], of_own: Sequence[Tensor | None]) -> _Linear:
    outputs, inputs = own[0].shape  # type: ignore[union-attr]  # a bias may be missing, a weight never
    return _Linear(*(address(each) for each in (*own, *of_own)), inputs, outputs)


def _like(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else torch.empty_like(weight)


def _run(name: str, job: Any, *, backward: bool) -> None:
    native, threads = library(), torch.get_num_threads()
    size = getattr(native, f"{name}_scratch")
    size.restype = COUNT
    scratch = torch.empty(size(ctypes.byref(job), COUNT(backward), COUNT(threads)))
    run = getattr(native, f"{name}_attention_backward" if backward else f"{name}_attention")
    run(ctypes.byref(job), ADDRESS(scratch.data_ptr()), COUNT(threads))
