"""The builder of task graphs, in Python (`Pipeline`) and from a config file (`pipeline_from_config`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distflow.errors import hint
from distflow.graph.fields import PipelineError
from distflow.graph.nodes import NODE_SETTINGS, Node, split_arguments
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
        **arguments: Any,
    ) -> "Pipeline":
        """Add a node that runs `func` after the nodes that write what it reads, and those of `deps`.

        The arguments are those of `Node`. Further keywords are options of `func`, and take precedence over those of
        the config. Nothing is looked up or checked before `build`.
        """
        deps = () if deps is None else deps
        self._nodes.append(partial(Node, node_id, func, deps, **split_arguments(arguments)))  # type: ignore[arg-type]  # a node settles its deps
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
        raise PipelineError(f"{where}: '{reserved[0]}' is not an option; write it next to id and func")
    return options
