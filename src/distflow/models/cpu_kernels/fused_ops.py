"""Native code for the operations between the matrix products of a decoder layer on a CPU, forward and backward: each
reads its inputs and writes its outputs once. Products are in bfloat16 or float32. With bfloat16, forward rounds where
autocast does, and backward less often."""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distflow.models.cpu_kernels.build import ADDRESS, COUNT, Norm, address, library, norm_of


class _Heads(ctypes.Structure):
    _fields_ = [("norms", Norm * 2), ("heads", COUNT * 3), ("head_dim", COUNT)]


class _SavedForBackward(Protocol):
    """What a forward pass keeps for its backward pass."""

    needs_input_grad: tuple[bool, ...]
    epsilon: float
    dtype: torch.dtype

    @property
    def saved_tensors(self) -> tuple[Any, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def add_norm(x: Tensor, added: Tensor | None, norm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + added in float32, and its norm in the products' dtype. x: float32 `(rows, hidden)`; added: what a product
    made, or None for zeros. Differentiable once, as all here."""
    made: tuple[Tensor, Tensor] = _AddNorm.apply(x.contiguous(), added, norm.weight, norm.variance_epsilon, dtype)
    return made


def split_heads(projected: Tensor, cos: Tensor, sin: Tensor, attention: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries, rotated keys and values, all float32 `(rows, heads of each, head_dim)`.

    projected: by a product, `(rows, all heads · head_dim)`, in this order. cos, sin: float32 `(rows, head_dim)`."""
    norms = [getattr(attention, f"{name}_norm", None) for name in ("q", "k")]
    weights = [None if norm is None else norm.weight for norm in norms]
    epsilon = 0.0 if norms[0] is None else norms[0].variance_epsilon
    made: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(
        projected,
        cos.contiguous(),
        sin.contiguous(),
        len(attention.k_proj.weight) // attention.head_dim,
        epsilon,
        *weights,
    )
    return made


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, `(rows, size)`. gate_up: by a product, `(rows, 2 · size)`, gates first."""
    gated: Tensor = _Gate.apply(gate_up)
    return gated


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: _SavedForBackward, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        made, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        norm = norm_of(weight, None, epsilon)
        _run("add_norm", ctypes.byref(norm), x, added, COUNT(len(x)), _halves(normed), made, normed)
        ctx.save_for_backward(made, weight)
        ctx.epsilon = epsilon
        return made, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedForBackward, of_made: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        made, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(made), torch.empty_like(weight)
        of_added = torch.empty_like(of_normed) if ctx.needs_input_grad[1] else None
        norm, sums = norm_of(weight, of_weight, ctx.epsilon), weight.new_empty(torch.get_num_threads(), len(weight))
        given = (made, of_made.contiguous(), of_normed.contiguous(), COUNT(len(made)), _halves(of_normed))
        _run("add_norm_backward", ctypes.byref(norm), *given, of_x, of_added, sums)
        return of_x, of_added, of_weight, None, None


class _SplitHeads(Function):
    @staticmethod
    def forward(
        ctx: _SavedForBackward,
        projected: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_kv_heads: int,
        epsilon: float,
        *norms: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows, dim = cos.shape
        num_heads = projected.shape[1] // dim - 2 * num_kv_heads
        made = [cos.new_empty(rows, heads, dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        heads = _heads(made, epsilon, norms, (None, None))
        given = (projected, cos, sin, COUNT(rows), _halves(projected))
        _run("split_heads", ctypes.byref(heads), *given, _addresses(made))
        ctx.save_for_backward(projected if norms[0] is not None else None, cos, sin, *norms)
        ctx.epsilon, ctx.dtype = epsilon, projected.dtype
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedForBackward, *of_made: Tensor) -> tuple[Tensor | None, ...]:
        projected, cos, sin, *norms = ctx.saved_tensors
        rows, dim = cos.shape
        of_norms = [None if norm is None else torch.empty_like(norm) for norm in norms]
        given = [each.contiguous() for each in of_made]
        heads = _heads(given, ctx.epsilon, norms, of_norms)
        of_projected = cos.new_empty(rows, sum(each.shape[1] for each in given) * dim, dtype=ctx.dtype)
        sums = cos.new_empty(torch.get_num_threads(), 2, dim)
        _run(
            *("split_heads_backward", ctypes.byref(heads), projected, cos, sin, COUNT(rows)),
            *(_halves(of_projected), _addresses(given), of_projected, sums),
        )
        return of_projected, None, None, None, None, *of_norms


def _heads(
    made: Sequence[Tensor], epsilon: float, norms: Sequence[Tensor | None], of_norms: Sequence[Tensor | None]
) -> _Heads:
    weights = zip(norms, of_norms, strict=True)
    return _Heads(
        (Norm * 2)(*(norm_of(*each, epsilon) for each in weights)),
        (COUNT * 3)(*(each.shape[1] for each in made)),
        made[0].shape[2],
    )


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ADDRESS * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class _Gate(Function):
    @staticmethod
    def forward(ctx: _SavedForBackward, gate_up: Tensor) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        gated = gate_up.new_empty(rows, size)
        _run("gate_rows", gate_up, COUNT(rows), COUNT(size), _halves(gated), gated)
        ctx.save_for_backward(gate_up)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedForBackward, of_gated: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, size = of_gated.shape
        of_gate_up = torch.empty_like(gate_up)
        given = (gate_up, of_gated.contiguous(), COUNT(rows), COUNT(size), _halves(gate_up))
        _run("gate_rows_backward", *given, of_gate_up)
        return of_gate_up


def _halves(numbers: Tensor) -> ctypes.c_int64:
    return COUNT(numbers.dtype == torch.bfloat16)


def _run(name: str, *arguments: Any) -> None:
    """arguments: tensors, None for one that is not there, and what C takes as it is; the threads come last."""
    given = (ADDRESS(address(each)) if each is None or isinstance(each, Tensor) else each for each in arguments)
    getattr(library(), name)(*given, COUNT(torch.get_num_threads()))
