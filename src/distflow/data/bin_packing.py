"""Bin packing of samples by tokens: into micro-batches of bounded size, and of a step's groups
evenly over ranks.

Both give the longest item in turn to the lightest bin; micro-batches of which one would be too
large use first-fit decreasing.
"""

import heapq
from collections.abc import Sequence

Parts = list[list[int]]


def pack(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> Parts:
    """Bins of indices into `lengths`, each of at most `max_tokens`, as few as first-fit decreasing
    needs.

    An item longer than `max_tokens` is never cut, but gets its own bin. There are at least
    `min_bins` bins, including empty ones if items are too few, so that all ranks can run the same
    number. Loads are even where that fits, which keeps peak memory and waits between ranks low.
    Indices ascend within a bin, bins by their first index, empty ones last. The same arguments
    always give the same bins.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    lengths = [int(length) for length in lengths]
    assert min_bins >= 0 and all(length >= 0 for length in lengths)
    alone = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    longest_first = sorted(
        (i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: -lengths[i]
    )

    packed = _first_fit(longest_first, lengths, max_tokens)
    num_bins = max(len(packed), min_bins - len(alone))
    if num_bins:
        even = lightest_first(longest_first, lengths, num_bins)
        fits = max(_load(bin_, lengths) for bin_ in even) <= max_tokens
        packed = even if fits else packed + [[] for _ in range(num_bins - len(packed))]
    bins = [sorted(bin_) for bin_ in alone + packed]
    return sorted(bins, key=lambda bin_: bin_[0] if bin_ else len(lengths))


def lightest_first(longest_first: Sequence[int], lengths: Sequence[int], num_bins: int) -> Parts:
    """Put each item in turn into the lightest bin so far (Graham 1969), the first of equals."""
    bins: Parts = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for item in longest_first:
        load, b = loads[0]
        bins[b].append(item)
        heapq.heapreplace(loads, (load + lengths[item], b))
    return bins


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Parts:
    bins: Parts = []
    room: list[int] = []
    for item in longest_first:
        length = lengths[item]
        b = next((b for b, free in enumerate(room) if free >= length), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[b].append(item)
        room[b] -= length
    return bins


def _load(bin_: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in bin_)


def partition(lengths: Sequence[int], num_parts: int) -> Parts:
    """Exactly `num_parts` lists of indices into `lengths`, with balanced sums.

    Parts are empty if items are too few. Indices ascend within a part, parts by their first index,
    empty ones last; the same arguments always give the same parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    loads = [int(length) for length in lengths]
    heaviest_first = sorted(range(len(loads)), key=lambda item: -loads[item])
    best = lightest_first(heaviest_first, loads, num_parts)
    return sorted(map(sorted, best), key=lambda part: part[0] if part else len(loads))


def divide_step(
    lengths: Sequence[int], passes: Sequence[Sequence[Sequence[int]]], num_parts: int
) -> Parts:
    """Divide the items of a step over ranks so that no optimizer step waits for a rank with more of
    its mini-batch.

    passes: the mini-batches of each pass over the step, of indices into `lengths`, each index in
    one of them. In a single pass `partition` balances each mini-batch; several passes draw new
    mini-batches of items that stay on their ranks, and a sorted greedy balances all of them
    together.
    """
    if len(passes) == 1:
        return _divide_pass(lengths, passes[0], num_parts)
    parts: Parts = [[] for _ in range(num_parts)]
    # loads of each part, by mini-batch
    loads = [[[0] * num_parts for _ in mini_batches] for mini_batches in passes]
    homes: list[list[list[int]]] = [[] for _ in lengths]  # loads of each item's mini-batches
    for own, mini_batches in zip(loads, passes, strict=True):
        for load, mini_batch in zip(own, mini_batches, strict=True):
            for item in mini_batch:
                homes[item].append(load)
    totals = [0] * num_parts
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        part = min(
            range(num_parts),
            key=lambda part: (sum(load[part] for load in homes[item]), totals[part]),
        )
        parts[part].append(item)
        for load in (*homes[item], totals):
            load[part] += lengths[item]
    return [sorted(part) for part in parts]


def _divide_pass(
    lengths: Sequence[int], mini_batches: Sequence[Sequence[int]], num_parts: int
) -> Parts:
    """Give the heaviest share of each mini-batch to the part that was lightest before it."""
    parts: Parts = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for mini_batch in mini_batches:
        found = [
            [mini_batch[i] for i in part]
            for part in partition([lengths[i] for i in mini_batch], num_parts)
        ]
        found.sort(key=lambda items: -sum(lengths[i] for i in items))
        for part, items in zip(
            sorted(range(num_parts), key=lambda part: loads[part]), found, strict=True
        ):
            parts[part] += items
            loads[part] += sum(lengths[i] for i in items)
    return [sorted(part) for part in parts]
