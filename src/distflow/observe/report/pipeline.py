"""The pipeline of a run as a graph to draw, from plan.json: which node runs after which."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypedDict

from distflow.observe.files import JSON
from distflow.observe.reading.run_reader import read_json
from distflow.observe.report.summary import Steps

MAX_NODES = 100


class DrawnNode(TypedDict):
    """deps: nodes that it directly follows, without those that it follows by way of others. layer: how many nodes lie
    on the longest way to it. seconds: the mean of its phase a step, None where that was not timed."""

    name: str
    role: str
    plane: str
    engines: list[str]
    reads: list[str]
    writes: list[str]
    deps: list[str]
    layer: int
    phase: str
    seconds: float | None


def pipeline_graph(run_dir: Path, steps: Steps) -> list[DrawnNode]:
    """The nodes in an order in which they may run; none where plan.json tells none, or something that is no graph."""
    plan = read_json(run_dir, "plan.json")
    nodes = _nodes(plan)
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
        node["seconds"] = _mean_seconds(node["phase"], steps) if node["plane"] == "training" else None
    return nodes


def _nodes(plan: Mapping[str, JSON]) -> list[DrawnNode]:
    nodes = plan.get("nodes")
    found = nodes if isinstance(nodes, list) else []
    return [_node(node) for node in found if isinstance(node, dict) and isinstance(node.get("name"), str)]


def _node(node: Mapping[str, JSON]) -> DrawnNode:
    return {
        "name": str(node["name"]),
        "role": str(node.get("role", "")),
        "plane": str(node.get("plane", "")),
        "engines": _texts(node.get("engines")),
        "reads": _texts(node.get("reads")),
        "writes": _texts(node.get("writes")),
        "deps": _texts(node.get("deps")),
        "layer": 0,
        "phase": str(node.get("phase", "")),
        "seconds": None,
    }


def _texts(value: JSON) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _mean_seconds(phase: str, steps: Steps) -> float | None:
    times: Sequence[float] = [values[name] for values in steps.values() if (name := f"timing_s/{phase}") in values]
    return float(f"{sum(times) / len(times):.4g}") if times else None
