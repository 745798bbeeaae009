"""Draws from softmax(logits / temperature) by native code, a row at a time."""

import ctypes

import torch
from torch import Tensor

from distflow.models.native.arguments import ADDRESS, COUNT
from distflow.models.native.build import library


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor] | None:
    """Token ids int64 and their log-probs float64, `(rows,)`: of each row the first token, in vocabulary order, whose
    cumulative mass exceeds `uniform` (float64 `(rows,)`, in [0, 1)) of the total. logits: float32 `(rows, vocab)`, on
    the CPU. None where one is NaN or +inf, or a row is -inf altogether. Raises NotNative."""
    logits, uniform, threads = logits.contiguous(), uniform.contiguous(), torch.get_num_threads()
    rows, size = logits.shape
    masses, tokens = torch.empty(threads, size), torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows, dtype=torch.float64)
    all_drawn = library().draw(
        *(ADDRESS(logits.data_ptr()), COUNT(rows), COUNT(size), ctypes.c_float(temperature)),
        *(ADDRESS(tensor.data_ptr()) for tensor in (uniform, masses, tokens, log_probs)),
        COUNT(threads),
    )
    return (tokens, log_probs) if all_drawn else None
