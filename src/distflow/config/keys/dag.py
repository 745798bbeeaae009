"""Keys of `dag`: which pipeline runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from distflow.builtin_names import PIPELINES
from distflow.config.compose.values import Mismatch, show
from distflow.config.keys.declare import key

NODE_KEYS = (
    "id",
    "type",
    "role",
    "func",
    "deps",
    "options",
    "only_forward_compute",
    "config",
    "engine",
    "writes",
    "scope",
    "plane",
    "phase",
    "validates",
    "retry_limit",
)


_OF_SIIRL = {
    "node_id": "id",
    "node_type": "type",
    "node_role": "role",
    "dependencies": "deps",
    "executable_ref": "func",
}
"""Keys of a node in siiRL's files, with their names here."""

MARKERS = ("PUT_TO_BUFFER", "GET_FROM_BUFFER", "BARRIER_SYNC")
"""Types of nodes that have no func."""


def parse_pipeline(value: object) -> str | tuple[dict[str, object], ...] | None:
    """A name as it is; nodes written in YAML if each has an id and, unless it is a marker, a func. Raises Mismatch
    naming the entry."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise Mismatch(
            f"is {show(value)}, neither a name nor a list of nodes",
            f"write one of {', '.join(PIPELINES)}, module:function, file.py:function, or nodes as "
            "- {id: ..., func: module:function, deps: [...]}",
        )
    seen: set[str] = set()
    for place, node in enumerate(value, start=1):
        _check_node(place, node, seen)
    return tuple(dict(node) for node in value)


def _check_node(place: int, node: object, seen: set[str]) -> None:
    if not isinstance(node, Mapping):
        raise Mismatch(f"has {node!r} as entry {place}, not a mapping", f"its keys are {', '.join(NODE_KEYS)}")
    renamed = [name for name in node if name in _OF_SIIRL]
    if renamed:
        names = ", ".join(f"'{name}' is {_OF_SIIRL[name]}" for name in renamed)
        raise Mismatch(f"has an entry {place} in siiRL's words", f"{names} here")
    for name in ("id", "func"):
        if not isinstance(node.get(name), str) and not (name == "func" and _is_marker(node)):
            raise Mismatch(f"has an entry {place} without '{name}'", "every node has an id and a func: module:function")
    unknown = [name for name in node if name not in NODE_KEYS]
    if unknown:
        raise Mismatch(
            f"has a node '{node['id']}' with the unknown key '{unknown[0]}'",
            f"the keys of a node are {', '.join(NODE_KEYS)}; what its function takes goes under options",
        )
    if node["id"] in seen:
        raise Mismatch(f"has two nodes with the id '{node['id']}'", "give each node an id of its own")
    seen.add(node["id"])


def _is_marker(node: Mapping[str, object]) -> bool:
    return "func" not in node and str(node.get("type")).removeprefix("NodeType.").upper() in MARKERS


@dataclass(frozen=True)
class DagConfig:
    """The pipeline that runs, and how it is laid out on devices."""

    pipeline: str | tuple[dict[str, object], ...] | None = key(
        None,
        f"built-in pipeline ({', '.join(PIPELINES)}), module:function or file.py:function that returns one, or a list "
        f"of nodes ({', '.join(NODE_KEYS)}); null goes by algorithm.workflow_type and adv_estimator",
        parse=parse_pipeline,
    )
    generates: bool | None = key(
        None, "whether your own pipeline generates its training data; null infers it from its nodes"
    )
    enable_perf: bool = key(False, "time each node in the metrics")
    backend_threshold: int = key(
        32, "number of ranks from which objects use a separate gloo group beside nccl (launcher=ray)", minimum=1
    )
    apportion_strategy: str = key(
        "param_aware",
        "how independent parts of a pipeline share the devices: by the parameters of their models, or evenly",
        choices=("param_aware", "even"),
    )
    model_sizes: dict[str, str | float] = key(
        {},
        "parameter counts for param_aware by role, e.g. {actor: 70B, critic: 500M}; a missing one is computed from "
        "the model's config.json",
    )
    consider_node_cohesion: bool = key(True, "place a part that fits on one machine on one machine")
    consider_node_load: bool = key(True, "of machines that suit a part equally, take the one with fewer busy devices")
