"""Bin packing of samples by tokens: into micro-batches of bounded size, and of a step's groups
evenly over ranks.

Both give the longest item in turn to the lightest bin; micro-batches of which one would be too
large use first-fit decreasing.
"""

import heapq
import math
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
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alone = [[i] for i in longest_first if lengths[i] > max_tokens]
    rest = [i for i in longest_first if lengths[i] <= max_tokens]

    packed = _first_fit(rest, lengths, max_tokens)
    num_bins = max(len(packed), min_bins - len(alone))

    even = lightest_first(rest, lengths, num_bins) if num_bins else []
    if all(sum(lengths[i] for i in bin_) <= max_tokens for bin_ in even):
        packed = even
    else:
        packed += [[] for _ in range(num_bins - len(packed))]

    return _in_order(alone + packed)


def _in_order(bins: Parts) -> Parts:
    """Indices ascending within a bin, bins by their first index, empty ones last."""
    return sorted(map(sorted, bins), key=lambda bin_: bin_[0] if bin_ else math.inf)


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


def partition(lengths: Sequence[int], num_parts: int) -> Parts:
    """Exactly `num_parts` lists of indices into `lengths`, with balanced sums.

    Parts are empty if items are too few. Indices ascend within a part, parts by their first index,
    empty ones last; the same arguments always give the same parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    loads = [int(length) for length in lengths]
    heaviest_first = sorted(range(len(loads)), key=lambda item: -loads[item])
    return _in_order(lightest_first(heaviest_first, loads, num_parts))


def divide_step(
    lengths: Sequence[int], passes: Sequence[Sequence[Sequence[int]]], num_parts: int
) -> Parts:
    """Divide the items of a step over ranks so that no optimizer step waits for a rank with more of
    its mini-batch.

    passes: the mini-batches of each pass over the step, of indices into `lengths`, each index in
    one of them. The longest item in turn goes to the part with the least of the item's mini-batches
    so far, and of equal ones to the lightest.
    """
    parts: Parts = [[] for _ in range(num_parts)]
    totals = [0] * num_parts

    loads_of: list[list[list[int]]] = [[] for _ in lengths]
    for mini_batches in passes:
        for mini_batch in mini_batches:
            loads = [0] * num_parts
            for item in mini_batch:
                loads_of[item].append(loads)

    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        sums = [sum(loads) for loads in zip(*loads_of[item], strict=True)]
        weights = list(zip(sums, totals, strict=True))
        part = weights.index(min(weights))
        parts[part].append(item)
        for loads in (*loads_of[item], totals):
            loads[part] += lengths[item]

    return [sorted(part) for part in parts]
