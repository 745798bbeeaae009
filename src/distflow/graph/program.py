"""What `bind` returns: the frozen program that workers see."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.errors import hint
from distflow.graph.contract import Contract
from distflow.graph.drawing import Box, flowchart
from distflow.graph.errors import PipelineError
from distflow.graph.fields import Field
from distflow.graph.roles import NodeRole, NodeType
from distflow.graph.wiring import Plane


@dataclass(frozen=True)
class BoundNode:
    """A node under a config.

    fn: the function to run, the chosen one where the config chooses. deps: of this program, left-out nodes bridged.
    engines: the engines it uses. options: their values. config: the config group that it receives.
    filter_plugin: `(SampleInfo) -> bool`, which samples it takes from an exchange between workers.
    """

    node_id: str
    fn: Callable[..., Any]
    contract: Contract
    node_type: NodeType
    node_role: NodeRole
    deps: tuple[str, ...]
    plane: Plane
    engines: tuple[str, ...]
    options: Mapping[str, Any]
    only_forward_compute: bool
    agent_group: int
    retry_limit: int
    filter_plugin: Callable[..., bool] | None
    config: Any


@dataclass(frozen=True)
class Program:
    """The nodes in one deterministic topological order, and what they use.

    skipped: ids of the nodes that the config leaves out. fields: what each column is that a node writes or the data
    have; None for one that is not registered, whose axis is told by its shape. engines: engines that some node uses.
    takes: dotted config keys that some node takes; see `inert_keys`.
    """

    graph_id: str
    nodes: tuple[BoundNode, ...]
    skipped: tuple[str, ...]
    fields: Mapping[str, Field | None]
    engines: frozenset[str]
    takes: frozenset[str]

    @property
    def experience(self) -> tuple[BoundNode, ...]:
        """The nodes that run for each prompt group."""
        return tuple(node for node in self.nodes if node.plane == "experience")

    @property
    def learning(self) -> tuple[BoundNode, ...]:
        """The nodes that run for each step, on every training rank."""
        return tuple(node for node in self.nodes if node.plane == "learning")

    def node(self, node_id: str) -> BoundNode:
        """Raises PipelineError if the program has no such node."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        left_out = " (the config leaves it out)" if node_id in self.skipped else ""
        ids = [node.node_id for node in self.nodes]
        raise PipelineError(f"program '{self.graph_id}' has no node '{node_id}'{left_out}{hint(node_id, ids)}")

    def to_mermaid(self) -> str:
        """The program as a Mermaid flowchart with its planes; an edge shows the fields that go along it."""
        return flowchart([Box(n.node_id, n.node_role.name, n.contract, n.deps, n.plane, n.engines) for n in self.nodes])
