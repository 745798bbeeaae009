"""Log-probs of chosen tokens and entropies from logits, with no other matrix beside these.

Autograd by the formulas keeps, and makes on its way back, five matrices of the size of the logits. Here the log-probs
are written over the logits, the gradient over the log-probs, and what lies between is made for a few rows at a time,
which stay in the processor's cache; on another device, where many small operations cost more than they save, for all
rows at once.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2**19
_NEVER = -1e4  # kept in place of what is below: e to it is 0 in any precision, and 0 times it is 0


def log_probs_of(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` int64 `(n,)` under softmax(logits `(n, vocabulary)`) and, where wanted, its entropies,
    both `(n,)`, differentiable once. A logit of −inf adds 0 to the entropy. Logits that are differentiated are written
    over.
    """
    chosen, entropy = _LogProbs.apply(logits, targets, with_entropy)
    return chosen, entropy


class _Saved(Protocol):
    """What a forward pass keeps for its backward pass."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _LogProbs(Function):
    @staticmethod
    def forward(ctx: _Saved, logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        kept = logits.detach() if ctx.needs_input_grad[0] else None
        chosen = logits.new_empty(len(logits))
        entropy = logits.new_empty(len(logits)) if with_entropy else None
        for rows in _blocks(logits):
            log_probs = logits[rows].log_softmax(-1)
            chosen[rows] = log_probs.gather(-1, targets[rows, None])[:, 0]
            if kept is not None or with_entropy:
                log_probs = torch.clamp(log_probs, min=_NEVER, out=log_probs if kept is None else kept[rows])
            if entropy is not None:
                entropy[rows] = log_probs.exp().mul_(log_probs).sum(-1).neg_()
        ctx.save_for_backward(kept, targets, entropy)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, of_chosen: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, None, None]:
        """With p the probabilities and H the entropy: d log p_t / dz = 1_t − p, dH / dz = −p (log p + H)."""
        grad, targets, entropy = ctx.saved_tensors
        if of_chosen is None:
            of_chosen = grad.new_zeros(len(grad))
        for rows in _blocks(grad):
            block, weight = grad[rows], -of_chosen[rows, None]
            if of_entropy is not None:
                of_log = -of_entropy[rows, None]
                weight = torch.addcmul(weight + of_log * entropy[rows, None], block, of_log)
            block.exp_().mul_(weight)
        return grad.scatter_add_(-1, targets[:, None], of_chosen[:, None]), None, None


def _blocks(matrix: Tensor) -> Iterator[slice]:
    num_rows = max(1, BLOCK_ELEMENTS // matrix.shape[1] if matrix.device.type == "cpu" else len(matrix))
    return (slice(start, start + num_rows) for start in range(0, len(matrix), num_rows))
