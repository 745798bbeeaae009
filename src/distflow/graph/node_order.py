"""The order of nodes in a graph: topological order, cycles, ancestors."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from distflow.errors import PipelineError, hint

Edges = Mapping[str, Sequence[str]]


def topological_order(deps: Edges) -> list[str]:
    """Node ids after their deps; of the nodes that are ready, the one added first. The graph must
    have no cycle."""
    rank = {node_id: i for i, node_id in enumerate(deps)}
    sorter = TopologicalSorter(deps)
    sorter.prepare()
    ready: list[tuple[int, str]] = []

    order: list[str] = []
    while sorter.is_active():
        for node_id in sorter.get_ready():
            heappush(ready, (rank[node_id], node_id))
        order.append(heappop(ready)[1])
        sorter.done(order[-1])

    return order


def dependents(deps: Edges) -> dict[str, list[str]]:
    """The reverse edges: node id → ids that depend on it, in the order in which they were added."""
    out: dict[str, list[str]] = {node_id: [] for node_id in deps}
    for node_id, ids in deps.items():
        for dep in dict.fromkeys(ids):
            out[dep].append(node_id)
    return out


def ancestors(deps: Edges) -> dict[str, frozenset[str]]:
    """All nodes that must have run before each node."""
    out: dict[str, frozenset[str]] = {}
    for node_id in topological_order(deps):
        out[node_id] = frozenset(deps[node_id]).union(*(out[dep] for dep in deps[node_id]))
    return out


def _check_edges(deps: Edges) -> None:
    """Raises PipelineError for no nodes, an unknown dependency, or a cycle."""
    if not deps:
        raise PipelineError("the graph has no nodes; add at least one with add_node")

    for node_id, ids in deps.items():
        for dep in ids:
            if dep not in deps:
                others = [other for other in deps if other != node_id]
                raise PipelineError(
                    f"node '{node_id}' depends on '{dep}', which is not a node{hint(dep, others)}"
                )

    try:
        TopologicalSorter(deps).prepare()
    except CycleError as error:  # the second argument is the path, in the direction of the data
        raise PipelineError(
            f"the nodes form a cycle: {' -> '.join(error.args[1])}; remove one of these deps, or "
            "stop reading a column that a later node writes"
        ) from None
