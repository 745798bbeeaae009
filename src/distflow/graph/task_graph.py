"""The graph of a pipeline's nodes, mutable until `bind` returns the frozen pipeline, and its
builders: in Python (`Pipeline`) and from a config file (`pipeline_from_config`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distflow.errors import PipelineError, hint
from distflow.graph.bind_to_config import BoundPipeline, bind_pipeline, check_options
from distflow.graph.drawing import Box, flowchart
from distflow.graph.fields import Field
from distflow.graph.graph_node import NODE_SETTINGS, Node, contracts_of, split_arguments
from distflow.graph.node_order import dependents
from distflow.graph.node_spec import is_factory
from distflow.graph.wiring import Wiring


class TaskGraph:
    """Nodes and their dependencies. `nodes` maps node id → Node, in the order in which they were
    added."""

    def __init__(self, graph_id: str, description: str = "") -> None:
        self.graph_id = graph_id
        self.description = description
        self.nodes: dict[str, Node] = {}

    def add_node(self, node: Node) -> None:
        """Add a node. Raises PipelineError if it is not a node, or its id is taken."""
        if not isinstance(node, Node):
            raise PipelineError(
                f"a graph consists of nodes, not {node!r}: write Node(node_id, func, deps)"
            )
        if node.node_id in self.nodes:
            raise PipelineError(f"node '{node.node_id}' exists already; node ids must be unique")
        self.nodes[node.node_id] = node

    def remove_node(self, node_id: str) -> Node:
        """Remove a node; its dependents inherit its deps. Raises PipelineError if it does not
        exist."""
        removed = self.get_node(node_id)
        del self.nodes[node_id]

        for other in self.nodes.values():
            if node_id not in other.deps:
                continue
            place = other.deps.index(node_id)
            spliced = (*other.deps[:place], *removed.deps, *other.deps[place + 1 :])
            self.nodes[other.node_id] = replace(other, deps=tuple(dict.fromkeys(spliced)))

        return removed

    def update_node(self, node_id: str, /, **changes: Any) -> Node:
        """Change arguments of a node; other names are options of its function, added to the
        existing ones.

        Raises PipelineError if the node does not exist or a value does not fit.
        """
        node = self.get_node(node_id)
        if "node_id" in changes:
            raise PipelineError(
                f"{node.where}: the id of a node cannot change; remove the node and add another"
            )

        made = split_arguments(changes)
        made["options"] = {**node.options, **made["options"]}
        self.nodes[node_id] = replace(node, **made)
        return self.nodes[node_id]

    def get_node(self, node_id: str) -> Node:
        """The node. Raises PipelineError if it does not exist."""
        if node_id not in self.nodes:
            raise PipelineError(
                f"graph '{self.graph_id}' has no node '{node_id}'{hint(node_id, self.nodes)}"
            )
        return self.nodes[node_id]

    def get_entry_nodes(self) -> list[Node]:
        """The nodes that depend on none, by deps or by what they read."""
        return [self.nodes[node_id] for node_id, deps in self._wiring().deps.items() if not deps]

    def get_exit_nodes(self) -> list[Node]:
        """The nodes on which none depends, by deps or by what it reads."""
        found = dependents(self._wiring().deps)
        return [self.nodes[node_id] for node_id, others in found.items() if not others]

    def get_dependencies(self, node_id: str) -> list[Node]:
        """The nodes on which this one depends, by deps or by what it reads."""
        self.get_node(node_id)
        return [self.nodes[dep] for dep in self._wiring().deps[node_id]]

    def get_dependents(self, node_id: str) -> list[Node]:
        """The nodes that depend on this one, by deps or by what they read."""
        self.get_node(node_id)
        return [self.nodes[other] for other in dependents(self._wiring().deps)[node_id]]

    get_downstream_nodes = get_dependents
    """siiRL's name for it."""

    def get_topological_sort(self) -> list[str]:
        """Node ids such that each comes after its deps; of those that could come next, the one
        added first.

        Raises PipelineError for an unknown dependency or a cycle.
        """
        return self._wiring().order

    def validate_graph(self) -> tuple[bool, str | None]:
        """(True, None), or False and what is wrong with the structure. See `check`."""
        try:
            self.check()
        except PipelineError as error:
            return False, str(error)
        return True, None

    def check(self) -> None:
        """Raises PipelineError if the structure is wrong, as far as can be checked without a
        config."""
        wiring = self._wiring()
        for vertex in wiring.vertices.values():
            if not is_factory(vertex.node.fn):
                check_options(vertex.node, vertex.contract)
        wiring.check()

    def path_of(self, policy: str) -> "TaskGraph":
        """The graph that trains this policy alone: its nodes, and those that all policies share."""
        path = TaskGraph(self.graph_id, self.description)
        others = {name for name, node in self.nodes.items() if node.policy not in (None, policy)}

        for name, node in self.nodes.items():
            if name not in others:
                deps = tuple(dep for dep in node.deps if dep not in others)
                path.nodes[name] = replace(node, deps=deps)

        return path

    def copy(self) -> "TaskGraph":
        graph = TaskGraph(self.graph_id, self.description)
        graph.nodes = dict(self.nodes)
        return graph

    def bind(
        self, config: object, data_fields: Iterable[str] | Mapping[str, Field]
    ) -> BoundPipeline:
        """The frozen pipeline under this config, for data with these columns.

        config: any object with the config groups as attributes. data_fields: the columns that the
        loader delivers. Raises PipelineError if something does not fit: see `bind_pipeline`.
        """
        self.check()
        return bind_pipeline(self.graph_id, self.nodes.values(), config, data_fields)

    def to_mermaid(self) -> str:
        """A Mermaid flowchart; an edge shows the fields that its end reads of what its start
        writes."""
        wiring = self._wiring()
        boxes = [
            Box(
                node_id,
                vertex.node.node_role.name,
                vertex.contract,
                wiring.deps[node_id],
                engines=vertex.engines,
            )
            for node_id, vertex in wiring.vertices.items()
        ]

        return flowchart(boxes)

    def _wiring(self) -> Wiring:
        return Wiring(self.nodes, contracts_of(self.nodes))


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
        """Add a node that runs `func` after the nodes that write what it reads, and those of
        `deps`.

        The arguments are those of `Node`. Further keywords are options of `func`, and take
        precedence over those of the config. Nothing is looked up or checked before `build`.
        """
        deps = () if deps is None else deps
        # a node settles its deps
        self._nodes.append(partial(Node, node_id, func, deps, **split_arguments(arguments)))  # type: ignore[arg-type]
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
    """The graph of `dag.pipeline`, whose entries the config has checked: id, func, deps, type,
    role, options and the other arguments of `Node`. Raises PipelineError that names the entry."""
    pipeline = Pipeline(pipeline_id)
    for i, entry in enumerate(nodes, 1):
        options = _options_of(entry, f"entry {i} of the nodes ({entry['id']!r})")
        settings = {_ENTRY_KEYS[key]: value for key, value in entry.items() if key != "options"}
        pipeline.add_node(**settings, **options)
    return pipeline.build()


def _options_of(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    options = entry.get("options") or {}
    if not isinstance(options, Mapping):
        raise PipelineError(
            f"{where}: options must be a mapping of names to values, not {options!r}"
        )
    if not all(isinstance(name, str) for name in options):
        raise PipelineError(f"{where}: names of options must be str, not {options!r}")

    reserved = [name for name in options if name in _ENTRY_KEYS.values()]
    if reserved:
        raise PipelineError(
            f"{where}: '{reserved[0]}' is not an option; write it next to id and func"
        )

    return options
