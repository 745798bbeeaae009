"""On which ranks parts lie, for machines of equally many devices: node cohesion first, then node load, then rank."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Machines and their devices; rank r is on machine r // devices_per_node."""

    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node


def place(shares: Sequence[int], cluster: Cluster, cohesion: bool = True, load: bool = True) -> list[tuple[int, ...]]:
    """The ranks of each part, ascending. shares: devices of each, all of the cluster's together.

    cohesion: parts that fit on one machine are each put on one, where the rest can follow best (`_cost` looks ahead);
    larger ones, and what fits nowhere whole, then take as few machines as they can. load: of machines that suit a part
    alike, the one with fewer busy devices. At last the lower ranks.
    """
    assert sum(shares) == cluster.num_devices, f"shares {shares} are not the {cluster.num_devices} devices"
    size = cluster.devices_per_node
    free = [list(range(node * size, node * size + size)) for node in range(cluster.num_nodes)]
    ranks: list[list[int]] = [[] for _ in shares]
    order = list(range(len(shares)))
    if cohesion:
        for part in [part for part in order if shares[part] <= size]:
            later = [shares[other] for other in order if other != part]
            node = _best_node(shares[part], [len(ranks_) for ranks_ in free], later, size, load)
            if node is not None:
                order.remove(part)
                ranks[part] = _take(free[node], shares[part])
    for part in order:
        while len(ranks[part]) < shares[part]:
            wanted = shares[part] - len(ranks[part])
            holes = [len(ranks_) for ranks_ in free]
            node = _next_node(wanted, holes) if cohesion else _any_node(holes, load)
            ranks[part] += _take(free[node], min(wanted, holes[node]) if cohesion else 1)
    return [tuple(sorted(found)) for found in ranks]


def _best_node(share: int, holes: list[int], later: list[int], size: int, load: bool) -> int | None:
    """The machine on which a part lies whole at the least cost for those that come later; None where none has room."""
    costs = {hole: _cost(later, _less(holes, holes.index(hole), share), size) for hole in set(holes) if hole >= share}
    fits = [node for node, hole in enumerate(holes) if hole in costs]
    return min(fits, key=lambda node: (costs[holes[node]], -holes[node] if load else 0, node), default=None)


def _cost(shares: list[int], holes: list[int], size: int) -> tuple[int, int]:
    """(parts that fit on one machine and lie on several, pieces of parts), as tight packing would end."""
    left = sorted((share for share in shares if share <= size), reverse=True)
    holes = sorted(holes)
    pieces = 0
    for node, hole in enumerate(holes):
        for share in _filling(left, hole):
            left.remove(share)
            holes[node] -= share
            pieces += 1
    for share in [*left, *(share for share in shares if share > size)]:
        while share:
            node = _next_node(share, holes)
            taken = min(share, holes[node])
            share, holes[node], pieces = share - taken, holes[node] - taken, pieces + 1
    return len(left), pieces


def _filling(shares: list[int], hole: int) -> list[int]:
    """Of the shares, descending, those that fill a hole best; of such sets one with the largest shares."""
    best: dict[int, list[int]] = {0: []}  # by their sum
    for share in shares:
        for total, chosen in list(best.items()):
            if total + share <= hole:
                best.setdefault(total + share, [*chosen, share])
    return best[max(best)]


def _next_node(wanted: int, holes: list[int]) -> int:
    """Where the next piece of a part goes: the smallest hole that takes all of it, else the largest."""
    enough = [hole for hole in holes if hole >= wanted]
    return holes.index(min(enough) if enough else max(holes))


def _any_node(holes: list[int], load: bool) -> int:
    return holes.index(max(holes)) if load else next(node for node, hole in enumerate(holes) if hole)


def _less(holes: list[int], node: int, share: int) -> list[int]:
    return [hole - share if at == node else hole for at, hole in enumerate(holes)]


def _take(free: list[int], count: int) -> list[int]:
    taken, free[:count] = free[:count], []
    return taken
