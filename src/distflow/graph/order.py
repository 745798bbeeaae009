"""Order in a graph given as node id → ids it depends on: topological order, cycles, ancestors."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

Edges = Mapping[str, Sequence[str]]


def topological_order(deps: Edges) -> list[str]:
    """Kahn's order; of the nodes that are ready, the one added first comes first. Wants no cycle."""
    rank = {node_id: i for i, node_id in enumerate(deps)}
    names = list(deps)
    waits_for = {node_id: len(set(ids)) for node_id, ids in deps.items()}
    unblocks = dependents(deps)
    ready = [rank[node_id] for node_id, count in waits_for.items() if count == 0]
    heapify(ready)
    order: list[str] = []
    while ready:
        node_id = names[heappop(ready)]
        order.append(node_id)
        for other in unblocks[node_id]:
            waits_for[other] -= 1
            if waits_for[other] == 0:
                heappush(ready, rank[other])
    assert len(order) == len(names), "a cyclic graph has no order"
    return order


def dependents(deps: Edges) -> dict[str, list[str]]:
    """The reverse edges: node id → ids that depend on it, in the order in which they were added."""
    out: dict[str, list[str]] = {node_id: [] for node_id in deps}
    for node_id, ids in deps.items():
        for dep in dict.fromkeys(ids):
            out[dep].append(node_id)
    return out


def find_cycle(deps: Edges) -> list[str] | None:
    """One cycle as a path in the direction of the data, its first node again at the end; None if there is none."""
    done: set[str] = set()
    for start in deps:
        path: list[str] = []
        on_path: set[str] = set()
        stack = [(start, False)]
        while stack:
            node_id, leaving = stack.pop()
            if leaving:
                done.add(node_id)
                on_path.remove(path.pop())
            elif node_id in on_path:
                return [*path[path.index(node_id) :], node_id][::-1]
            elif node_id not in done:
                path.append(node_id)
                on_path.add(node_id)
                stack.append((node_id, True))
                stack.extend((dep, False) for dep in reversed(deps[node_id]))
    return None


def ancestors(deps: Edges) -> dict[str, frozenset[str]]:
    """All nodes that must have run before each node."""
    out: dict[str, frozenset[str]] = {}
    for node_id in topological_order(deps):
        out[node_id] = frozenset(deps[node_id]).union(*(out[dep] for dep in deps[node_id]))
    return out
