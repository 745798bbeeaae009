"""The learning plane: the same nodes on every rank, on its own share of a step."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.graph import BoundNode, NodeRole, NodeStatus
from distflow.observe.timing import PhaseTimer
from distflow.runtime.blame import NodeError, node_error
from distflow.runtime.checks import TrustError
from distflow.runtime.context import NodeContext
from distflow.runtime.invoke import call_node, merge_output
from distflow.training.collective import Collective

PHASES = {
    (NodeRole.ACTOR, True): "recompute_logp",
    (NodeRole.ACTOR, False): "train_step",
    (NodeRole.REFERENCE, True): "ref_logp",
    (NodeRole.REFERENCE, False): "ref_logp",
    (NodeRole.CRITIC, True): "compute_value",
    (NodeRole.CRITIC, False): "train_critic",
    (NodeRole.ADVANTAGE, False): "compute_advantage",
}


@dataclass
class LearningPlane:
    """Runs the learning nodes of a program on one step's batch.

    per_node: also time each node (`perf/<node id>`, seconds). status: of each node in the current step.
    """

    nodes: tuple[BoundNode, ...]
    engines: Mapping[str, Any]
    reduce: Collective
    phases: PhaseTimer
    per_node: bool = False

    def __post_init__(self) -> None:
        self.status = {node.node_id: NodeStatus.PENDING for node in self.nodes}

    def run(self, batch: Batch, context: Callable[[str], NodeContext]) -> tuple[Batch, dict[str, float]]:
        """The batch with all that the nodes wrote, and their metrics. Raises NodeError naming the node."""
        self.status = {node.node_id: NodeStatus.PENDING for node in self.nodes}
        metrics: dict[str, float] = {}
        for node in self.nodes:
            started = time.perf_counter()
            with self.phases(_phase(node)):
                batch, measured = self._run_node(node, batch, context(node.node_id))
            metrics |= measured
            if self.per_node:
                metrics[f"perf/{node.node_id}"] = time.perf_counter() - started
        return batch, metrics

    def _run_node(self, node: BoundNode, batch: Batch, ctx: NodeContext) -> tuple[Batch, dict[str, float]]:
        self.status[node.node_id] = NodeStatus.RUNNING
        for attempt in range(node.retry_limit + 1):
            try:
                output = call_node(node, batch, self.engines, ctx, self.reduce)
                merged = merge_output(node, batch, output)
            except (NodeError, TrustError, UserError):
                self.status[node.node_id] = NodeStatus.FAILED
                raise
            except Exception as err:  # the edge of a user's code
                if attempt < node.retry_limit:
                    continue
                self.status[node.node_id] = NodeStatus.FAILED
                raise node_error(node, err) from err
            self.status[node.node_id] = NodeStatus.COMPLETED
            return merged
        raise AssertionError("the last attempt returns or raises")


def _phase(node: BoundNode) -> str:
    """What its time is called; a node that uses no engine has a phase of its own, but for the advantages."""
    known = PHASES.get((node.node_role, node.only_forward_compute))
    return known if known and (node.engines or node.node_role is NodeRole.ADVANTAGE) else node.node_id
