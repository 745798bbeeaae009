"""The plan of a run: the nodes of each rank, and the channels between them. Plain frozen data that
needs no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distflow.errors import count_of
from distflow.graph import BoundPipeline
from distflow.planning.layouts import Layout, ProcessGroup, Ranks

ChannelKind = Literal["local", "stream", "exchange"]


@dataclass(frozen=True)
class Channel:
    """How one node's output reaches another."""

    source: str
    target: str
    kind: ChannelKind
    """By reference on one worker (`local`), over the sample queue (`stream`), or resharded over
    ranks (`exchange`)."""


@dataclass(frozen=True)
class RankPlan:
    """What one worker runs and needs."""

    rank: int
    device: str
    rollout_nodes: tuple[str, ...]
    """In order."""
    training_nodes: tuple[str, ...]
    """In order."""
    engines: tuple[str, ...]
    services: tuple[str, ...]
    node: int = 0
    """Its machine."""
    rollout_group: Ranks = ()
    """The ranks on whose devices its rollout engine computes, if there are several."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.rollout_nodes, *self.training_nodes)


@dataclass(frozen=True)
class Plan:
    """Placement of a pipeline."""

    pipeline: str
    ranks: tuple[RankPlan, ...]
    channels: tuple[Channel, ...]
    layouts: tuple[Layout, ...] = ()
    """Of each role's model, if there are several ranks."""
    groups: tuple[ProcessGroup, ...] = ()
    """Process groups, in the order in which every rank creates them."""
    backends: tuple[str, ...] = ()
    """Of these groups, that for tensors first."""

    @property
    def generates(self) -> bool:
        """Whether some worker has the rollout engine."""
        return any("rollout" in rank.engines for rank in self.ranks)

    @property
    def generating_only(self) -> Ranks:
        """The ranks that have the rollout engine and train nothing."""
        return tuple(
            rank.rank
            for rank in self.ranks
            if "rollout" in rank.engines and not rank.training_nodes
        )

    def layout(self, role: str) -> Layout | None:
        """The layout of a role's model; None for a role that the plan does not place, and for a
        single rank."""
        return next((layout for layout in self.layouts if layout.role == role), None)

    def placed(self) -> str:
        """Text that says which workers hold the model of each role."""
        machines = len({rank.node for rank in self.ranks})
        roles = "; ".join(f"{layout.role} on {_listed(layout.ranks)}" for layout in self.layouts)
        return f"{len(self.ranks)} on {count_of(machines, 'machine')}: {roles}"


def _listed(ranks: Ranks) -> str:
    side_by_side = ranks[-1] - ranks[0] == len(ranks) - 1 > 1
    if side_by_side:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def plan_local(pipeline: BoundPipeline, device: str) -> Plan:
    rollout_nodes = [node.node_id for node in pipeline.rollout_nodes]
    training_nodes = [node.node_id for node in pipeline.training_nodes]
    rank = rank_plan(pipeline, 0, device, rollout_nodes, training_nodes)
    return Plan(pipeline.graph_id, (rank,), make_channels(pipeline, (rank,)))


def rank_plan(
    pipeline: BoundPipeline,
    rank: int,
    device: str,
    rollout_nodes: Sequence[str],
    training_nodes: Sequence[str],
    node: int = 0,
) -> RankPlan:
    """A worker with these nodes, and the engines and services that they use."""
    engines: dict[str, None] = {}
    services: dict[str, None] = {}
    for node_id in (*rollout_nodes, *training_nodes):
        bound = pipeline.node(node_id)
        engines.update(dict.fromkeys(bound.engines))
        services.update(dict.fromkeys(bound.contract.services))

    return RankPlan(
        rank,
        device,
        tuple(rollout_nodes),
        tuple(training_nodes),
        tuple(engines),
        tuple(services),
        node,
    )


def dp_groups_of(plan: Plan) -> tuple[Ranks, ...]:
    """Ranks that run the same nodes of the training loop, and so share every step. The dp group
    that trains the policy is first; its first rank reports for all."""
    dp_groups: dict[tuple[str, ...], list[int]] = {}
    for rank in plan.ranks:
        if rank.training_nodes:
            dp_groups.setdefault(rank.training_nodes, []).append(rank.rank)
    found = [tuple(dp_group) for dp_group in dp_groups.values()]
    return tuple(sorted(found, key=lambda dp_group: "actor" not in plan.ranks[dp_group[0]].engines))


def make_channels(pipeline: BoundPipeline, ranks: Sequence[RankPlan]) -> tuple[Channel, ...]:
    """How each node gets the columns of its deps: by reference if every rank that runs it also runs
    the other."""
    homes: dict[str, set[int]] = {node.node_id: set() for node in pipeline.nodes}
    for rank in ranks:
        for node_id in rank.nodes:
            homes[node_id].add(rank.rank)

    rollout_nodes = {node.node_id for node in pipeline.rollout_nodes}
    found = []
    for node in pipeline.nodes:
        for dep in node.deps:
            kind: ChannelKind = "exchange"
            if dep in rollout_nodes and node.plane == "training":
                kind = "stream"
            elif homes[node.node_id] <= homes[dep]:
                kind = "local"
            found.append(Channel(dep, node.node_id, kind))

    return tuple(found)
