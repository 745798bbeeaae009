"""From losses of tokens to the loss of a mini-batch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def aggregate(
    rows: Sequence[Tensor], mode: str, scale: float | None = None, every_row: bool = False
) -> Tensor:
    """rows: the losses of the tokens that count, of each response. A response without such a token
    is not a part of means over responses, unless every row counts. A batch without tokens has the
    loss 0."""
    zero = torch.zeros((), dtype=torch.float64)
    with_tokens = [row for row in rows if len(row)]
    num_tokens = sum(len(row) for row in rows)
    if not with_tokens:
        return zero
    if mode == "token-mean":
        return sum((row.sum() for row in with_tokens), zero) / num_tokens

    total = zero
    for row in with_tokens:
        if mode == "seq-mean-token-sum":
            total = total + row.sum()
        elif mode == "seq-mean-token-mean":
            total = total + row.mean()
        else:
            assert mode == "seq-mean-token-sum-norm"
            total = total + row.sum() / scale

    return total / (len(rows) if every_row else len(with_tokens))
