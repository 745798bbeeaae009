"""Native code for the operations between the matrix products of a decoder layer on a CPU, forward and backward: each
reads its inputs and writes its outputs once. Products are in bfloat16 or float32. With bfloat16, forward rounds where
autocast does, and backward less often."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distflow.models.cpu_kernels.build import ADDRESS, COUNT, Norm, address, library, norm_of


class _Heads(ctypes.Structure):
    _fields_ = [("norms", Norm * 2), ("heads", COUNT * 3), ("head_dim", COUNT)]


def add_norm(x: Tensor, added: Tensor | None, norm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + added in float32, and its norm in the products' dtype. x: float32 `(rows, hidden)`; added: a product, or
    None for zeros. Differentiable once, as all here."""
    outputs: tuple[Tensor, Tensor] = _AddNorm.apply(x.contiguous(), added, norm.weight, norm.variance_epsilon, dtype)
    return outputs


def split_heads(projected: Tensor, cos: Tensor, sin: Tensor, attention: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries, rotated keys and values, all float32 `(rows, heads of each, head_dim)`.

    projected: by a product, `(rows, all heads · head_dim)`, in this order. cos, sin: float32 `(rows, head_dim)`."""
    norms = [getattr(attention, f"{name}_norm", None) for name in ("q", "k")]
    weights = [None if norm is None else norm.weight for norm in norms]
    epsilon = 0.0 if norms[0] is None else norms[0].variance_epsilon
    outputs: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(
        projected,
        cos.contiguous(),
        sin.contiguous(),
        len(attention.k_proj.weight) // attention.head_dim,
        epsilon,
        *weights,
    )
    return outputs


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, `(rows, size)`. gate_up: by a product, `(rows, 2 · size)`, gates first."""
    gated: Tensor = _Gate.apply(gate_up)
    return gated


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        outputs, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        norm = norm_of(weight, None, epsilon)
        _run("add_norm", ctypes.byref(norm), x, added, COUNT(len(x)), _halves(normed), outputs, normed)
        ctx.save_for_backward(outputs, weight)
        ctx.epsilon = epsilon
        return outputs, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(outputs), torch.empty_like(weight)
        of_added = torch.empty_like(of_normed) if ctx.needs_input_grad[1] else None
        norm, sums = norm_of(weight, of_weight, ctx.epsilon), weight.new_empty(torch.get_num_threads(), len(weight))
        operands = (outputs, of_outputs.contiguous(), of_normed.contiguous(), COUNT(len(outputs)), _halves(of_normed))
        _run("add_norm_backward", ctypes.byref(norm), *operands, of_x, of_added, sums)
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
        outputs = [cos.new_empty(rows, heads, dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        heads = _heads(outputs, epsilon, norms, (None, None))
        operands = (projected, cos, sin, COUNT(rows), _halves(projected))
        _run("split_heads", ctypes.byref(heads), *operands, _addresses(outputs))
        ctx.save_for_backward(projected if norms[0] is not None else None, cos, sin, *norms)
        ctx.epsilon, ctx.dtype = epsilon, projected.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        projected, cos, sin, *norms = ctx.saved_tensors
        rows, dim = cos.shape
        of_norms = [None if norm is None else torch.empty_like(norm) for norm in norms]
        operands = [each.contiguous() for each in of_outputs]
        heads = _heads(operands, ctx.epsilon, norms, of_norms)
        of_projected = cos.new_empty(rows, sum(each.shape[1] for each in operands) * dim, dtype=ctx.dtype)
        sums = cos.new_empty(torch.get_num_threads(), 2, dim)
        _run(
            *("split_heads_backward", ctypes.byref(heads), projected, cos, sin, COUNT(rows)),
            *(_halves(of_projected), _addresses(operands), of_projected, sums),
        )
        return of_projected, None, None, None, None, *of_norms


def _heads(
    outputs: Sequence[Tensor], epsilon: float, norms: Sequence[Tensor | None], of_norms: Sequence[Tensor | None]
) -> _Heads:
    weights = zip(norms, of_norms, strict=True)
    return _Heads(
        (Norm * 2)(*(norm_of(*each, epsilon) for each in weights)),
        (COUNT * 3)(*(each.shape[1] for each in outputs)),
        outputs[0].shape[2],
    )


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ADDRESS * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        gated = gate_up.new_empty(rows, size)
        _run("gate_rows", gate_up, COUNT(rows), COUNT(size), _halves(gated), gated)
        ctx.save_for_backward(gate_up)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gated: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, size = of_gated.shape
        of_gate_up = torch.empty_like(gate_up)
        operands = (gate_up, of_gated.contiguous(), COUNT(rows), COUNT(size), _halves(gate_up))
        _run("gate_rows_backward", *operands, of_gate_up)
        return of_gate_up


def _halves(numbers: Tensor) -> ctypes.c_int64:
    return COUNT(numbers.dtype == torch.bfloat16)


def _run(name: str, *arguments: Any) -> None:
    """arguments: tensors, None for a missing one, and values of C; the number of threads comes last."""
    operands = (ADDRESS(address(each)) if each is None or isinstance(each, Tensor) else each for each in arguments)
    getattr(library(), name)(*operands, COUNT(torch.get_num_threads()))
