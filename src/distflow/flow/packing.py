"""Packs items into bins of bounded size: micro-batches bounded by tokens. First-fit decreasing, then evened out."""

import heapq
from collections.abc import Sequence

Bins = list[list[int]]


def pack(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> Bins:
    """Bins of indices into `lengths`, each of at most `max_tokens`, as few as first-fit decreasing needs.

    An item longer than `max_tokens` is never cut: it is a bin of its own. There are at least `min_bins` bins, empty
    ones included where items are too few, so that all ranks can run the same number. Loads are evened out over the
    bins, which keeps the peak of memory and the wait between ranks low. Indices ascend within a bin, bins by their
    first index, empty ones last. The same arguments always give the same bins.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    lengths = [int(length) for length in lengths]
    assert min_bins >= 0 and all(length >= 0 for length in lengths)
    alone = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    longest_first = sorted((i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: -lengths[i])

    packed = _first_fit(longest_first, lengths, max_tokens)
    num_bins = max(len(packed), min_bins - len(alone))
    if num_bins:
        even = lightest_first(longest_first, lengths, num_bins)
        fits = max(_load(bin_, lengths) for bin_ in even) <= max_tokens
        packed = even if fits else _level(packed + [[] for _ in range(num_bins - len(packed))], lengths)
    bins = [sorted(bin_) for bin_ in alone + packed]
    return sorted(bins, key=lambda bin_: bin_[0] if bin_ else len(lengths))


def lightest_first(longest_first: Sequence[int], lengths: Sequence[int], num_bins: int) -> Bins:
    """Each item in turn to the bin that is lightest so far (Graham 1969), the first of equals."""
    bins: Bins = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for item in longest_first:
        load, b = loads[0]
        bins[b].append(item)
        heapq.heapreplace(loads, (load + lengths[item], b))
    return bins


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Bins:
    bins: Bins = []
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


def _level(bins: Bins, lengths: Sequence[int]) -> Bins:
    """Move or swap items between the heaviest and the lightest bin while that brings the two closer.

    No bin ever gets heavier than the heaviest was, so bins that fitted still fit; the squares of the loads only
    fall, so it ends.
    """
    loads = [_load(bin_, lengths) for bin_ in bins]
    while True:
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        shifts = [
            (abs(2 * shift - gap), give, take)
            for give in bins[heavy]
            for take in (-1, *bins[light])
            if 0 < (shift := lengths[give] - (lengths[take] if take >= 0 else 0)) < gap
        ]
        if not shifts:
            return bins
        _, give, take = min(shifts)
        _transfer(bins, loads, lengths, heavy, light, give)
        if take >= 0:
            _transfer(bins, loads, lengths, light, heavy, take)


def _transfer(bins: Bins, loads: list[int], lengths: Sequence[int], source: int, target: int, item: int) -> None:
    bins[source].remove(item)
    bins[target].append(item)
    loads[source] -= lengths[item]
    loads[target] += lengths[item]


def _load(bin_: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in bin_)
