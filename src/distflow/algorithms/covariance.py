"""Which tokens of a step lower the policy's entropy most, and how a few of them are chosen alike on any ranks.

The covariance of log-prob and advantage: "The entropy mechanism of RL" (Cui et al. 2025, arXiv:2505.22617).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distflow.algorithms.masking import Reduce, global_sum, masked_mean, under_mask
from distflow.graph.fields import register_field

register_field("selected_tokens", doc="1 on tokens that the policy loss treats apart, chosen before the update")


def token_covariance(
    advantages: Tensor, old_log_probs: Tensor, loss_mask: Tensor, reduce: Reduce | None = None
) -> Tensor:
    """(A − mean A)·(logπ_old − mean logπ_old) of each token, float64, 0 outside the mask.

    All `(bs, response_length)`; the means are over the tokens of the batch of all ranks.
    """
    parts = [(x.double() - masked_mean(x, loss_mask, reduce)) for x in (advantages, old_log_probs)]
    return under_mask(parts[0], loss_mask) * under_mask(parts[1], loss_mask)


def check_share(name: str, share: float) -> None:
    """Raises ValueError for an option that is no share of the tokens."""
    if not 0 < share <= 1:
        raise ValueError(f"{name} is a share of the tokens, above 0 and at most 1, not {share}")


def num_selected(share: float, loss_mask: Tensor, reduce: Reduce | None = None) -> int:
    """That share of the tokens of all ranks, rounded down, at least one."""
    tokens = global_sum((loss_mask > 0).sum().double(), reduce)
    return max(int(share * float(tokens)), 1)


def token_draws(uid: Sequence[str], loss_mask: Tensor) -> Tensor:
    """A number in 0..1 for each token, float64 `(bs, response_length)`: its sample's uid and its position decide it."""
    length = loss_mask.shape[-1]
    rows = [_random_bits(name, length) for name in uid]
    bits = np.stack(rows) if rows else np.zeros((0, length), dtype=np.uint64)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(loss_mask.device)


def _random_bits(uid: str, length: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    key = int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")
    return np.random.Philox(key=key).random_raw(length)


def largest(values: Tensor, ties: Tensor, among: Tensor, count: int, reduce: Reduce | None = None) -> Tensor:
    """bool: the `count` largest values of all ranks under `among` (all of them where there are no more).

    Of equal values at the edge those with the larger `ties`. values, ties: float64.
    """
    cut = _cut(values, among, count, reduce)
    above, at = among & (_ordered(values) > cut), among & (_ordered(values) == cut)
    left = count - int(global_sum(above.sum().double(), reduce))
    return above | (at & (_ordered(ties) >= _cut(ties, at, left, reduce)))


def _cut(values: Tensor, among: Tensor, count: int, reduce: Reduce | None) -> int:
    """The `count`-th largest of the values of all ranks, by bisection over their bits: ranks share counts only."""
    bits, low, high = _ordered(values), -(2**63), 2**63 - 1
    while low < high:
        middle = (low + high + 1) // 2
        if float(global_sum((among & (bits >= middle)).sum().double(), reduce)) >= count:
            low = middle
        else:
            high = middle - 1
    return low


def _ordered(values: Tensor) -> Tensor:
    """float64 as int64 in the same order."""
    bits = (values + 0.0).contiguous().view(torch.int64)  # −0 becomes 0
    return bits ^ ((bits >> 63) & (2**63 - 1))
