"""Divides a batch into micro-batches bounded by tokens."""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.flow.packing import pack


def micro_batches(batch: Batch, max_tokens: int, min_micro_batches: int = 1) -> list[Tensor]:
    """Indices of each micro-batch's samples, int64; deterministic, every sample once.

    At most `max_tokens` tokens (prompt and response) in each, but for a longer sample, which is one by itself and
    never cut. At least `min_micro_batches` of them, empty ones where there are fewer samples.
    """
    lengths = batch.lengths("sequence").tolist()
    return [torch.tensor(bin, dtype=torch.int64) for bin in pack(lengths, max_tokens, min_micro_batches)]
