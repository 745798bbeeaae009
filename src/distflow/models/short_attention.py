"""Causal attention of short sequences on a CPU, as batched products of matrices: in float64, and where there is no
native code (`native/attend.py`).

The processor's fused kernel goes through a sequence in pieces that are small products: below some hundred tokens these
cost more than the half of the matrix that they leave out, and two threads hardly halve them. Here a batched product
has all query heads of a key-value head as one matrix, for as many sequences at a time as stay in the cache.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LONGEST = 128
"""Of sequences that gain by it, in tokens: the matrix of weights that is kept has at most so many columns."""

_BLOCK_ELEMENTS = 2**17  # of scores for each thread, 512 KiB


def attend_short(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query `(sequences, heads, tokens, head_dim)`, key and value `(sequences, kv_heads, tokens, head_dim)`, of one
    type, float32 or float64; each token looks at those up to it. As query, differentiable once."""
    tokens, dim = query.shape[2:]
    num_matrices = len(key) * key.shape[1]
    shapes = (num_matrices, -1, dim), (num_matrices, tokens, dim), (num_matrices, tokens, dim)
    matrices = (x.reshape(shape) for x, shape in zip((query, key, value), shapes, strict=True))
    mixed: Tensor = _ShortAttention.apply(*matrices, scale)
    return mixed.view(query.shape)


class _Saved(Protocol):
    """What a forward pass keeps for its backward pass."""

    scale: float
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _ShortAttention(Function):
    """Queries `(matrices, heads of each · tokens, head_dim)`, keys and values `(matrices, tokens, head_dim)`."""

    @staticmethod
    def forward(ctx: _Saved, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        rows, tokens = queries.shape[1], keys.shape[1]
        unseen = keys.new_full((tokens, tokens), float("-inf")).triu_(1).repeat(rows // tokens, 1)
        kept = keys.new_empty(len(keys), rows, tokens) if any(ctx.needs_input_grad) else None
        mixed = torch.empty_like(queries)
        for block in _blocks(queries, keys):
            scores = torch.baddbmm(unseen, queries[block], keys[block].transpose(1, 2), alpha=scale)
            weights = torch.softmax(scores, -1, out=scores if kept is None else kept[block])
            torch.bmm(weights, values[block], out=mixed[block])
        ctx.save_for_backward(queries, keys, values, kept, mixed)
        ctx.scale = scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """With P = softmax(S), O = P V: dS = P (dO Vᵀ − ⟨dO, O⟩) (arXiv 2205.14135, appendix B)."""
        queries, keys, values, kept, mixed = ctx.saved_tensors
        of_queries, of_keys, of_values = (torch.empty_like(x) for x in (queries, keys, values))
        for block in _blocks(queries, keys):
            weights, of_mixed = kept[block], grad[block]
            torch.bmm(weights.transpose(1, 2), of_mixed, out=of_values[block])
            of_sums = (of_mixed * mixed[block]).sum(-1, keepdim=True)
            of_scores = torch.bmm(of_mixed, values[block].transpose(1, 2)).sub_(of_sums).mul_(weights)
            torch.bmm(of_scores, keys[block], out=of_queries[block]).mul_(ctx.scale)
            torch.bmm(of_scores.transpose(1, 2), queries[block], out=of_keys[block]).mul_(ctx.scale)
        return of_queries, of_keys, of_values, None


def _blocks(queries: Tensor, keys: Tensor) -> Iterator[slice]:
    """Of matrices whose scores stay in the caches of the threads that make them."""
    size = max(1, torch.get_num_threads() * _BLOCK_ELEMENTS // (queries.shape[1] * keys.shape[1]))
    return (slice(start, start + size) for start in range(0, len(queries), size))
