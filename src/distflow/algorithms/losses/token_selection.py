"""A share of a step's tokens, selected by the covariance of log-prob and advantage or at random.

Selected once per step, with the policy before its first update, independent of the number of ranks.
verl and the authors of Clip-Cov and KL-Cov (PRIME-RL/Entropy-Mechanism-of-RL), whose options these
are, select in each micro-batch with the current policy.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import (
    Reduce,
    global_sum,
    masked_mean,
    under_mask,
)
from distflow.graph.fields import register_field

register_field(
    "selected_tokens",
    doc="1 on tokens that the policy loss treats specially, selected before the update",
)


def token_covariance(
    advantages: Tensor, old_log_probs: Tensor, loss_mask: Tensor, reduce: Reduce | None = None
) -> Tensor:
    """(A − mean A)·(logπ_old − mean logπ_old) of each token, float64, 0 outside the mask.

    All `(bs, response_length)`; the means are over the tokens of the batch of all ranks.
    """
    parts = [(x.double() - masked_mean(x, loss_mask, reduce)) for x in (advantages, old_log_probs)]
    return under_mask(parts[0], loss_mask) * under_mask(parts[1], loss_mask)


def check_share(name: str, share: float) -> None:
    """Raises ValueError if the share is outside its range."""
    if not 0 < share <= 1:
        raise ValueError(f"{name} is a share of the tokens, above 0 and at most 1, not {share}")


def num_selected(share: float, loss_mask: Tensor, reduce: Reduce | None = None) -> int:
    """The share as a number of tokens over all ranks, rounded down, at least one."""
    tokens = global_sum((loss_mask > 0).sum().double(), reduce)
    return max(int(share * float(tokens)), 1)


def token_draws(uid: Sequence[str], loss_mask: Tensor) -> Tensor:
    """A random number for each token, float64 `(bs, response_length)`, from its sample's uid and
    position; only their order matters."""
    length = loss_mask.shape[-1]
    keys = [
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        for name in uid
    ]

    rows = [np.random.Philox(key=key).random_raw(length) for key in keys]
    if rows:
        bits = np.stack(rows)
    else:
        bits = np.zeros((0, length), dtype=np.uint64)

    return torch.from_numpy(bits.astype(np.float64)).to(loss_mask.device)


def largest(
    values: Tensor, ties: Tensor, among: Tensor, count: int, reduce: Reduce | None = None
) -> Tensor:
    """bool: the `count` largest values of all ranks under `among` (all of them if there are no
    more).

    Among equal values at the threshold, larger `ties` win. values, ties: float64.
    """
    cut = _cut(values, among, count, reduce)
    above = among & (_ordered(values) > cut)
    at = among & (_ordered(values) == cut)
    left = count - int(global_sum(above.sum().double(), reduce))
    return above | (at & (_ordered(ties) >= _cut(ties, at, left, reduce)))


def _cut(values: Tensor, among: Tensor, count: int, reduce: Reduce | None) -> int:
    """The `count`-th largest of the values of all ranks, by bisection over their bits: ranks share
    counts only."""
    bits = _ordered(values)
    low = -(2**63)
    high = 2**63 - 1
    while low < high:
        middle = (low + high + 1) // 2
        if float(global_sum((among & (bits >= middle)).sum().double(), reduce)) >= count:
            low = middle
        else:
            high = middle - 1

    return low


def _ordered(values: Tensor) -> Tensor:
    """float64 as int64 in the same order."""
    bits = (values + 0.0).contiguous().view(torch.int64)  # turns −0 into 0
    return bits ^ ((bits >> 63) & (2**63 - 1))
