"""The order of the data (epoch and row of each group) and the split of a step into mini-batches.

Both are pure functions of the seed: the same on any machine and for any number of ranks.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

EPOCHS, MINI_BATCHES = 0, 1
"""Streams of `keyed_permutation`: one per purpose, so that equal seeds and counts never give equal orders."""

_WORD = (1 << 64) - 1


def keyed_permutation(num_items: int, seed: int, stream: int, *words: int) -> NDArray[np.int64]:
    """A permutation of `range(num_items)` drawn by counter: it depends only on the arguments.

    It sorts raw 64-bit Philox words (Salmon et al. 2011). Numpy guarantees those on every platform and in every
    version, but not `Generator.permutation`.
    At most two `words` distinguish draws of one stream. `(num_items,)` int64.
    """
    assert num_items >= 0 and len(words) <= 2, "the counter has room for two words besides the drawing one"
    key = np.array([seed & _WORD, stream], dtype=np.uint64)
    counter = np.array([0, 0, *words, *(0,) * (2 - len(words))], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(num_items), kind="stable")


@lru_cache(maxsize=16)
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool, domain: str = "") -> NDArray[np.int64]:
    """The rows of one pass over the data, or over a domain's, in the order of the groups: `(num_rows,)` int64,
    read-only."""
    words = [epoch]
    if domain:  # 8 bytes of BLAKE2b, independent of the other domains
        words.append(int.from_bytes(hashlib.blake2b(domain.encode(), digest_size=8).digest(), "little"))
    rows = keyed_permutation(num_rows, seed, EPOCHS, *words) if shuffle else np.arange(num_rows, dtype=np.int64)
    rows.flags.writeable = False
    return rows


def place(number: int, num_rows: int, seed: int, shuffle: bool, domain: str = "") -> tuple[int, int]:
    """Epoch and row of group `number`, for a data set of `num_rows` rows. For a domain, number and row are counted
    within it."""
    assert number >= 0 and num_rows > 0
    epoch, position = divmod(number, num_rows)
    return epoch, int(epoch_order(num_rows, seed, epoch, shuffle, domain)[position])


def total_steps(num_epochs: int, num_rows: int, consumer_batch: int) -> int:
    """Steps of a run that drops nothing: steps cross the borders of epochs, and the last one may be short."""
    return -(-num_epochs * num_rows // consumer_batch)


def grouped(items: Iterable[int], groups: Sequence[int] | None) -> list[list[int]]:
    """The items of each group together, in the order of the first ones. groups: of all items; None if each is alone."""
    members: dict[int, list[int]] = {}
    for item in items:
        members.setdefault(item if groups is None else int(groups[item]), []).append(item)
    return list(members.values())


def minibatches(
    num_samples: int, groups: Sequence[int] | None, mini_batch_prompts: int, seed: int, step: int, epoch: int
) -> list[list[int]]:
    """Sample indices of each mini-batch of `mini_batch_prompts` prompt groups; the last may be short.

    groups: the group of each sample, with samples in the order of their groups, which must not depend on the worker
    that produced them; None if each sample is a group of its own.
    epoch: the pass of the update over this step's samples, from 0. The order of the groups is drawn from
    (seed, step, epoch); groups stay whole, and indices ascend within a mini-batch.
    """
    if mini_batch_prompts < 1:
        raise ValueError(f"mini_batch_prompts must be at least 1, not {mini_batch_prompts}")
    assert groups is None or len(groups) == num_samples
    in_group_order = grouped(range(num_samples), groups)
    order = keyed_permutation(len(in_group_order), seed, MINI_BATCHES, step, epoch)
    return [
        sorted(sample for group in order[start : start + mini_batch_prompts] for sample in in_group_order[group])
        for start in range(0, len(order), mini_batch_prompts)
    ]
