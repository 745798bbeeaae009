"""The builder of task graphs, in Python (`Pipeline`) and from a config file (`pipeline_from_config`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distflow.errors import hint
from distflow.graph.fields import PipelineError
from distflow.graph.node_spec import NodeRole, NodeType, Plane, Scope
from distflow.graph.nodes import NODE_SETTINGS, Node
from distflow.graph.task_graph import TaskGraph


class Pipeline:
    """Builds a TaskGraph with one chained `add_node` per node."""

    def __init__(self, pipeline_id: str, description: str = "") -> None:
        self.pipeline_id = pipeline_id
        self.description = description
        self._nodes: list[Callable[[], Node]] = []

    def add_node(
        self,
        node_id: str,
        func: str | Callable[..., object] | None = None,
        deps: Sequence[str] | None = None,
        *,
        node_type: NodeType | str | None = None,
        node_role: NodeRole | str | None = None,
        only_forward_compute: bool = False,
        config: str | Mapping[str, object] | None = None,
        engine: str | None = None,
        writes: str | Sequence[str] | None = None,
        scope: Scope | None = None,
        plane: Plane | None = None,
        phase: str | None = None,
        validates: bool | None = None,
        retry_limit: int = 0,
        **options: object,
    ) -> "Pipeline":
        """Add a node that runs `func` after the nodes that write what it reads, and those of `deps`.

        The arguments are those of `Node`. Further keywords are options of `func`, and take precedence over those of
        the config. Nothing is looked up or checked before `build`.
        """
        settings: dict[str, object] = {
            "node_type": node_type,
            "node_role": node_role,
            "only_forward_compute": only_forward_compute,
            "config": config,
            "engine": engine,
            "writes": writes,
            "scope": scope,
            "plane": plane,
            "phase": phase,
            "validates": validates,
            "retry_limit": retry_limit,
        }
        self._nodes.append(
            partial(Node, node_id, func, () if deps is None else deps, **settings, options=options)  # type: ignore[arg-type]  # a node checks and settles what it is given
        )
        return self

    def build(self) -> TaskGraph:
        """The checked graph. Raises PipelineError if its structure is wrong."""
        graph = TaskGraph(self.pipeline_id, self.description)
        for make in self._nodes:
            graph.add_node(make())
        graph.check()
        return graph


_ENTRY_KEYS = {name.removeprefix("node_"): name for name in NODE_SETTINGS}


def pipeline_from_config(pipeline_id: str, nodes: Sequence[Mapping[str, Any]]) -> TaskGraph:
    """The graph of a pipeline given as data: entries of id, func, deps, type, role, options and the other arguments of
    `Node`. Raises PipelineError that names the entry."""
    pipeline = Pipeline(pipeline_id)
    for i, entry in enumerate(nodes):
        where = f"entry {i + 1} of the nodes"
        if not isinstance(entry, Mapping):
            raise PipelineError(f"{where} must be a mapping of id, func, deps, ..., not {entry!r}")
        if not entry.get("id"):
            raise PipelineError(f"{where} has no id")
        where += f" ({entry['id']!r})"
        for key in entry:
            if key not in _ENTRY_KEYS and key != "options":
                raise PipelineError(f"{where} has the unknown key '{key}'{hint(str(key), [*_ENTRY_KEYS, 'options'])}")
        options = _options_of(entry, where)
        pipeline.add_node(**{_ENTRY_KEYS[key]: value for key, value in entry.items() if key != "options"}, **options)
    return pipeline.build()


def _options_of(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    options = entry.get("options") or {}
    if not isinstance(options, Mapping):
        raise PipelineError(f"{where}: options must be a mapping of names to values, not {options!r}")
    if not all(isinstance(name, str) for name in options):
        raise PipelineError(f"{where}: names of options must be str, not {options!r}")
    reserved = [name for name in options if name in _ENTRY_KEYS.values()]
    if reserved:
        raise PipelineError(f"{where}: '{reserved[0]}' is not an option; write it beside id and func")
    return options
