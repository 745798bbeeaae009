"""Places parts of a run on machines with equally many devices."""

from collections.abc import Sequence


def place(
    shares: Sequence[int], num_nodes: int, size: int, cohesion: bool = True, load: bool = True
) -> list[tuple[int, ...]]:
    """The ranks of each part, ascending; rank r is on machine r // size. shares: devices of each
    part; together all of the `num_nodes` machines with `size` devices each.

    cohesion: place a part on one machine if one has room, else on as few as it can. load: among
    equally suitable machines, prefer the one with fewer busy devices; then lower ranks. Parts that
    fit on a machine choose theirs first, the largest before others; on each machine ranks are in
    the order of the parts.
    """
    assert sum(shares) == num_nodes * size, (
        f"shares {shares} are not the {num_nodes * size} devices"
    )
    holes = [size] * num_nodes
    nodes_of: list[list[int]] = [[] for _ in shares]
    order = list(range(len(shares)))
    if cohesion:
        order.sort(key=lambda part: (shares[part] > size, -shares[part]))

    for part in order:
        wanted = shares[part]
        while wanted:
            node = _next_node(wanted, holes, cohesion, load)
            count = min(wanted, holes[node]) if cohesion else 1
            nodes_of[part] += [node] * count
            holes[node] -= count
            wanted -= count

    next_rank = [node * size for node in range(num_nodes)]
    ranks_of = []
    for nodes in nodes_of:
        ranks = []
        for node in sorted(nodes):
            ranks.append(next_rank[node])
            next_rank[node] += 1
        ranks_of.append(tuple(ranks))

    return ranks_of


def _next_node(wanted: int, holes: Sequence[int], cohesion: bool, load: bool) -> int:
    """The machine of a part's next devices. holes: free devices of each machine."""
    fits = [node for node, hole in enumerate(holes) if hole >= wanted]
    if not cohesion:
        fits = [node for node, hole in enumerate(holes) if hole]
    elif not fits:
        return holes.index(max(holes))

    if load:
        return max(fits, key=holes.__getitem__)
    return fits[0]
