"""Moving rows of a tensor by index where each row goes to one place, so that the backward pass is a move as well.

Autograd's own backward of `index_select` must assume repeated indices: its scattered additions took a third of a
training step on a CPU.
"""

from typing import Protocol

from torch import Tensor
from torch.autograd import Function


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` along dimension 0 for an `index` without repetition."""
    return _TakeRows.apply(values, index)


def spread_rows(values: Tensor, source: Tensor, home: Tensor) -> Tensor:
    """`values[source]`, where row i of `values` counts only as row `home[i]` of the result.

    The other rows are filling: `source` may repeat there, and the caller sees to it that they get no gradient.
    """
    return _SpreadRows.apply(values, source, home)


class _Saved(Protocol):
    """What a forward pass keeps for its backward pass."""

    num_rows: int

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _TakeRows(Function):
    @staticmethod
    def forward(ctx: _Saved, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = values.shape[0]
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_rows, *grad.shape[1:])).index_copy_(0, index, grad), None


class _SpreadRows(Function):
    @staticmethod
    def forward(ctx: _Saved, values: Tensor, source: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        return values.index_select(0, source)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, None, None]:
        (home,) = ctx.saved_tensors
        return grad.index_select(0, home), None, None
