"""What `bind` returns: the frozen pipeline that workers see."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distflow.errors import hint
from distflow.graph.contract import Contract
from distflow.graph.drawing import Box, flowchart, text_drawing
from distflow.graph.fields import Field, PipelineError
from distflow.graph.roles import NodeRole, NodeType, Plane


@dataclass(frozen=True)
class BoundNode:
    """A node under a config.

    fn: the function to run, which a factory made where one did. deps: the nodes that run before it, those that write
    what it reads among them. engines: those it uses. options: their values. phase: what its time is called.
    validates: a validation runs it as well. config: what its parameter `config` receives; config_key: the dotted key
    of that ("" is all, None is the node's own mapping).
    """

    node_id: str
    fn: Callable[..., object]
    contract: Contract
    node_type: NodeType
    node_role: NodeRole
    deps: tuple[str, ...]
    plane: Plane
    engines: tuple[str, ...]
    options: Mapping[str, object]
    retry_limit: int
    phase: str
    validates: bool
    config: object
    config_key: str | None


@dataclass(frozen=True)
class BoundPipeline:
    """The nodes in one deterministic topological order, and what they use.

    fields: the field of each column that a node writes or the data have. engines, services: those that some node uses.
    """

    graph_id: str
    nodes: tuple[BoundNode, ...]
    fields: Mapping[str, Field]
    engines: frozenset[str]
    services: frozenset[str]

    @property
    def rollout_nodes(self) -> tuple[BoundNode, ...]:
        """The nodes that run for each prompt group."""
        return tuple(node for node in self.nodes if node.plane == "rollout")

    @property
    def training_nodes(self) -> tuple[BoundNode, ...]:
        """The nodes that run for each step, on every training rank."""
        return tuple(node for node in self.nodes if node.plane == "training")

    def node(self, node_id: str) -> BoundNode:
        """Raises PipelineError if the pipeline has no such node."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        ids = [node.node_id for node in self.nodes]
        raise PipelineError(f"pipeline '{self.graph_id}' has no node '{node_id}'{hint(node_id, ids)}")

    def to_json(self) -> list[dict[str, object]]:
        """Each node as plain data: its kind, dependencies, and what it reads and writes."""
        return [
            {
                "name": node.node_id,
                "role": node.node_role.name,
                "plane": node.plane,
                "phase": node.phase,
                "deps": node.deps,
                "engines": node.engines,
                "reads": [*node.contract.reads, *node.contract.optional],
                "writes": node.contract.writes,
            }
            for node in self.nodes
        ]

    def to_mermaid(self) -> str:
        """The pipeline as a Mermaid flowchart with its planes; an edge shows the fields that it carries."""
        return flowchart(self._boxes())

    def to_text(self) -> str:
        """The same as text, for a terminal."""
        return text_drawing(self._boxes())

    def _boxes(self) -> list[Box]:
        return [Box(n.node_id, n.node_role.name, n.contract, n.deps, n.plane, n.engines) for n in self.nodes]
