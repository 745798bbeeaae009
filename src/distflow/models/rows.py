"""Moving rows of a tensor by index, with a backward pass that knows which rows repeat.

Autograd's own backward of `index_select` must assume that all do: additions in no fixed order on a GPU.
"""

from typing import Protocol

from torch import Tensor
from torch.autograd import Function


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` along dimension 0 for an `index` without repetition."""
    return _Rows.apply(values, index, False)


def repeat_rows(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` along dimension 0 for an `index` that may name a row many times."""
    return _Rows.apply(values, index, True)


def spread_rows(values: Tensor, source: Tensor, home: Tensor, again: Tensor | None = None) -> Tensor:
    """`values[source]`, where row i of `values` counts only as row `home[i]` of the result and, where given, as those
    of its rows that `again` names.

    The other rows are filling: `source` may repeat there, and the caller sees to it that they get no gradient.
    """
    return _SpreadRows.apply(values, source, home, again)


class _Saved(Protocol):
    """What a forward pass keeps for its backward pass."""

    num_rows: int
    repeats: bool

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Rows(Function):
    @staticmethod
    def forward(ctx: _Saved, values: Tensor, index: Tensor, repeats: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.repeats = values.shape[0], repeats
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        return _add_rows(total, index, grad) if ctx.repeats else total.index_copy_(0, index, grad), None, None


class _SpreadRows(Function):
    @staticmethod
    def forward(ctx: _Saved, values: Tensor, source: Tensor, home: Tensor, again: Tensor | None) -> Tensor:
        ctx.save_for_backward(home, again, None if again is None else source[again])
        return values.index_select(0, source)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, None, None, None]:
        home, again, repeated = ctx.saved_tensors
        summed = grad.index_select(0, home)
        return summed if again is None else _add_rows(summed, repeated, grad.index_select(0, again)), None, None, None


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """In place, and everywhere in the same order each time."""
    if total.device.type == "cpu":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)
