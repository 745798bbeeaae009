"""Places parts of a run on machines with equally many devices: each part on as few machines as
possible, then where fewer devices are busy, then on lower ranks."""

from collections.abc import Sequence


def place(
    shares: Sequence[int], num_nodes: int, size: int, cohesion: bool = True, load: bool = True
) -> list[tuple[int, ...]]:
    """The ranks of each part, ascending; rank r is on machine r // size. shares: devices of each
    part; together all of the `num_nodes` machines with `size` devices each.

    cohesion: place each part that fits on one machine on one, best for later parts (`_cost` looks
    ahead); all others then take as few machines as they can. load: among equally suitable machines,
    prefer the one with fewer busy devices; then lower ranks.
    """
    assert sum(shares) == num_nodes * size, (
        f"shares {shares} are not the {num_nodes * size} devices"
    )
    free = [list(range(node * size, node * size + size)) for node in range(num_nodes)]
    ranks: list[list[int]] = [[] for _ in shares]
    left = list(range(len(shares)))
    if cohesion:
        for part in [part for part in left if shares[part] <= size]:
            later = [shares[other] for other in left if other != part]
            node = _best_node(shares[part], [len(own) for own in free], later, size, load)
            if node is not None:
                left.remove(part)
                ranks[part] = _take(free[node], shares[part])
    for part in left:
        while len(ranks[part]) < shares[part]:
            wanted = shares[part] - len(ranks[part])
            holes = [len(own) for own in free]
            if cohesion:
                node = _next_node(wanted, holes)
                ranks[part] += _take(free[node], min(wanted, holes[node]))
                continue
            hole = max(holes) if load else next(filter(None, holes))
            ranks[part] += _take(free[holes.index(hole)], 1)
    return [tuple(sorted(found)) for found in ranks]


def _best_node(share: int, holes: list[int], later: list[int], size: int, load: bool) -> int | None:
    """The machine with room for a part that costs later parts least; None if no machine has
    room."""
    costs: dict[int, tuple[int, int]] = {}
    for hole in {hole for hole in holes if hole >= share}:
        left = holes.copy()
        left[left.index(hole)] -= share
        costs[hole] = _cost(later, left, size)
    fits = [node for node, hole in enumerate(holes) if hole in costs]
    return min(
        fits, key=lambda node: (costs[holes[node]], -holes[node] if load else 0, node), default=None
    )


def _cost(shares: list[int], holes: list[int], size: int) -> tuple[int, int]:
    """(parts that fit on one machine but span several, pieces of parts) after tight packing."""
    small = sorted((share for share in shares if share <= size), reverse=True)
    large = [share for share in shares if share > size]
    holes = sorted(holes)
    pieces = 0
    for node, hole in enumerate(holes):
        for share in _filling(small, hole):
            small.remove(share)
            holes[node] -= share
            pieces += 1
    for share in small + large:
        while share:
            node = _next_node(share, holes)
            piece = min(share, holes[node])
            share -= piece
            holes[node] -= piece
            pieces += 1
    return len(small), pieces


def _filling(shares: list[int], hole: int) -> list[int]:
    """Those of the descending shares that fill a hole best, preferring the largest ones."""
    best: dict[int, list[int]] = {0: []}  # shares by their sum
    for share in shares:
        for total, chosen in list(best.items()):
            if total + share <= hole:
                best.setdefault(total + share, [*chosen, share])
    return best[max(best)]


def _next_node(wanted: int, holes: list[int]) -> int:
    """The place of the next piece of a part: the smallest hole with room for all of it, else the
    largest."""
    enough = [hole for hole in holes if hole >= wanted]
    return holes.index(min(enough) if enough else max(holes))


def _take(free: list[int], count: int) -> list[int]:
    taken = free[:count]
    free[:count] = []
    return taken
