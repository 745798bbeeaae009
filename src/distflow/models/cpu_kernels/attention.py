"""Native code for causal attention of packed sequences in float32 on a CPU: each sequence to itself, shared prefixes
included, without padding and without a matrix that is saved for the backward pass."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distflow.models.cpu_kernels.build import addresses, call, counts, size
from distflow.models.packing import Sequences


class _Packing(ctypes.Structure):
    _fields_ = [
        *addresses("place", "starts", "shared"),
        *counts("sequences", "longest", "heads", "kv_heads", "head_dim"),
        ("scale", ctypes.c_float),
    ]


def attend(queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """queries: float32 `(rows, heads, head_dim)`; keys and values with their own number of heads. scale: of the
    scores, above 0. As queries; differentiable once. Raises NotNative."""
    mixed: Tensor = _Attention.apply(queries.contiguous(), keys.contiguous(), values.contiguous(), sequences, scale)
    return mixed


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float) -> Tensor:
        mixed, log_sums = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
        _run("attend", sequences, scale, queries, keys, values, mixed, log_sums)
        ctx.save_for_backward(queries, keys, values, mixed, log_sums)
        ctx.sequences, ctx.scale = sequences, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, mixed, log_sums = ctx.saved_tensors
        sequences, of_mixed = ctx.sequences, of_mixed.contiguous()
        added = [keys.new_empty(len(sequences.place), *keys.shape[1:]) for _ in range(2)]
        of_queries = torch.empty_like(queries)
        others = (mixed, log_sums, of_mixed, of_queries, *added)
        _run("attend_backward", sequences, ctx.scale, queries, keys, values, *others)
        if len(sequences.place) > len(keys):  # some rows are of several sequences
            for index, rows in enumerate(added):
                added[index] = torch.zeros_like(keys)
                call("add_rows", sequences.place, len(rows), keys[0].numel(), rows, added[index])
        return of_queries, *added, None, None


def _run(name: str, sequences: Sequences, scale: float, queries: Tensor, keys: Tensor, *others: Tensor) -> None:
    """others: values, and the C function's arguments after them."""
    of = (sequences.place, sequences.starts, sequences.shared)
    packing = _Packing(
        *(tensor.data_ptr() for tensor in of),
        *(len(sequences.shared), sequences.longest, queries.shape[1], keys.shape[1], queries.shape[2], scale),
    )
    scratch = torch.empty(torch.get_num_threads() * size("attend_scratch", packing))
    call(name, packing, queries, keys, *others, scratch)
