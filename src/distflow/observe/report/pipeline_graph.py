"""The pipeline as a graph, from plan.json."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from distflow.observe.crash_safe_files import JSON
from distflow.observe.findings.finding import Steps

MAX_NODES = 100
_NODE_LISTS = ("engines", "reads", "writes", "deps")


def drawn_nodes(listed: JSON, steps: Steps) -> list[dict[str, Any]]:
    """The nodes of a plan; empty if it has none, or they do not form a graph.

    deps: nodes that it directly follows, without transitive ones. layer: the number of nodes on the
    longest path to it. seconds: the mean time of its phase per step; None if not timed.
    """
    found = [
        node for node in (listed if isinstance(listed, list) else []) if isinstance(node, dict)
    ]
    nodes = [_node(node, steps) for node in found if isinstance(node.get("name"), str)]
    names = {node["name"] for node in nodes}
    deps = {node["name"]: [dep for dep in node["deps"] if dep in names] for node in nodes}
    try:
        order = list(TopologicalSorter(deps).static_order())
    except CycleError:
        return []
    if len(nodes) > MAX_NODES or len(names) < len(nodes):
        return []
    before: dict[str, set[str]] = {}
    layers: dict[str, int] = {}
    for name in order:
        before[name] = {far for dep in deps[name] for far in (dep, *before[dep])}
        layers[name] = 1 + max((layers[dep] for dep in deps[name]), default=-1)
    for node in nodes:
        own = deps[node["name"]]
        node["deps"] = [dep for dep in own if not any(dep in before[other] for other in own)]
        node["layer"] = layers[node["name"]]
    return nodes


def _node(node: Mapping[str, JSON], steps: Steps) -> dict[str, Any]:
    texts = {key: str(node.get(key, "")) for key in ("name", "role", "plane", "phase")}
    lists = {
        key: value if isinstance(value := node.get(key), list | tuple) else []
        for key in _NODE_LISTS
    }
    names = {key: [item for item in found if isinstance(item, str)] for key, found in lists.items()}
    timing = f"timing_s/{texts['phase']}"
    times = [
        values[timing]
        for values in steps.values()
        if timing in values and texts["plane"] == "training"
    ]
    return {
        **texts,
        **names,
        "layer": 0,
        "seconds": float(f"{sum(times) / len(times):.4g}") if times else None,
    }
