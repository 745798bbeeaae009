"""Divides the samples of a step over the ranks that read it: even by tokens first, near where they lie second."""

from collections import defaultdict
from collections.abc import Sequence

from distflow.flow.balance import Parts, partition


def divide(
    tokens: Sequence[int],
    num_ranks: int,
    groups: Sequence[int] | None = None,
    homes: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> Parts:
    """The samples of each rank, ascending. Every sample has one rank, and the same arguments give the same ranks.

    groups: of each sample, if groups must stay whole. homes: the node on which each sample lies; nodes: that of each
    rank. Where both are given, samples (or groups) of equal token counts change places so that as many as can be are
    at home; no rank's tokens change by it. A group is at home where its first sample lies.
    """
    if num_ranks == 1:
        return [list(range(len(tokens)))]
    parts = partition(tokens, num_ranks, groups)
    if not homes or len({*homes, *nodes}) < 2:
        return parts
    of_size: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)  # (rank, samples) of units, by tokens
    for rank, part in enumerate(parts):
        for unit in _units(part, groups):
            of_size[sum(tokens[sample] for sample in unit)].append((rank, unit))
    moved: Parts = [[] for _ in parts]
    for units in of_size.values():
        for rank, unit in _at_home(units, homes, nodes):
            moved[rank] += unit
    return [sorted(part) for part in moved]


def _units(part: Sequence[int], groups: Sequence[int] | None) -> list[list[int]]:
    """What moves as one: samples, or groups."""
    units: defaultdict[int, list[int]] = defaultdict(list)
    for sample in part:
        units[sample if groups is None else groups[sample]].append(sample)
    return list(units.values())


def _at_home(
    units: Sequence[tuple[int, list[int]]], homes: Sequence[str], nodes: Sequence[str]
) -> list[tuple[int, list[int]]]:
    """The same units over the same ranks, as many on their node as can be."""
    free: defaultdict[str, list[int]] = defaultdict(list)  # ranks of the places on a node, the first last
    for rank, _ in reversed(units):
        free[nodes[rank]].append(rank)
    placed: list[tuple[int, list[int]]] = []
    away: list[list[int]] = []
    for _, unit in units:
        home = free[homes[unit[0]]]
        if home:
            placed.append((home.pop(), unit))
        else:
            away.append(unit)
    left = sorted(rank for ranks in free.values() for rank in ranks)
    return placed + list(zip(left, away, strict=True))
