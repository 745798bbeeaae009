"""Divides a batch into micro-batches bounded by tokens."""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.flow.packing import pack
from distflow.training.collective import Collective


def micro_batches(batch: Batch, max_tokens: int, group: Collective) -> list[Tensor]:
    """Indices of each micro-batch's samples, int64; deterministic, every sample once.

    At most `max_tokens` tokens (prompt and response) in each, but for a longer sample, which is one by itself and
    never cut. Every rank of `group` gets as many as the one that needs most, empty ones where it has fewer samples.
    """
    lengths = batch.lengths("sequence").tolist()
    bins = pack(lengths, max_tokens)
    agreed = int(group.max(float(len(bins))))
    if agreed > len(bins):
        bins = pack(lengths, max_tokens, agreed)
    return [torch.tensor(bin, dtype=torch.int64) for bin in bins]
