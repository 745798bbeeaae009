"""The plan of a run: which rank runs which nodes, joined by which channels, and the process groups of the ranks.

Frozen data, made without any device.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from distflow.errors import UserError, hint
from distflow.graph import BoundPipeline
from distflow.planning.layout import AXES, Axis, Layout, Part

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that speak to each other. uses: each (role, axis) that they are a line of; the axis `all` is its mesh."""

    name: str
    ranks: tuple[int, ...]
    uses: tuple[tuple[str, str], ...]


def process_groups(layouts: Sequence[Layout]) -> tuple[ProcessGroup, ...]:
    """Every group of two ranks or more, once, whatever uses it: `process_group_1`, ... by their ranks, which is the
    order in which each rank must create them."""
    uses: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for layout in layouts:
        axes: tuple[Axis | Part, ...] = (*AXES, "replica", "shard") if layout.shard else AXES
        lines = [("all", layout.ranks), *((axis, line) for axis in axes for line in layout.groups(axis))]
        for axis, ranks in lines:
            if len(ranks) > 1:
                uses.setdefault(tuple(sorted(ranks)), []).append((layout.role, axis))
    return tuple(
        ProcessGroup(f"process_group_{number}", ranks, tuple(used))
        for number, (ranks, used) in enumerate(sorted(uses.items()), start=1)
    )


def choose_backends(device: str, num_ranks: int, threshold: int) -> tuple[Backend, ...]:
    """What carries tensors, first; from `threshold` ranks on gloo stands beside nccl and carries objects."""
    if not device.startswith("cuda"):
        return ("gloo",)
    return ("nccl", "gloo") if num_ranks >= threshold else ("nccl",)


ChannelKind = Literal["local", "stream", "exchange"]


@dataclass(frozen=True)
class Channel:
    """How one node's output reaches another: by reference on one worker (`local`), over the sample queue
    (`stream`), or re-partitioned over ranks (`exchange`)."""

    source: str
    target: str
    kind: ChannelKind


@dataclass(frozen=True)
class RankPlan:
    """What one worker builds and runs: its nodes by plane, in order, and the engines and services that they need.

    node: the machine that it is on.
    """

    rank: int
    device: str
    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    engines: tuple[str, ...]
    services: tuple[str, ...]
    node: int = 0


@dataclass(frozen=True)
class Plan:
    """Placement of a pipeline.

    layouts: of each role's model, where there are several ranks. groups: the process groups that they make, in the
    order in which every rank creates them. backends: of these groups, the one that carries tensors first.
    """

    pipeline: str
    ranks: tuple[RankPlan, ...]
    channels: tuple[Channel, ...]
    layouts: tuple[Layout, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    backends: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether some worker has an engine that answers prompts."""
        return any("rollout" in rank.engines for rank in self.ranks)

    def layout(self, role: str) -> Layout:
        """Raises UserError for a role that the plan does not place."""
        for layout in self.layouts:
            if layout.role == role:
                return layout
        raise UserError(f"the plan of '{self.pipeline}' places no '{role}'{hint(role, [x.role for x in self.layouts])}")

    def group_of(self, role: str, axis: str, rank: int) -> ProcessGroup | None:
        """The group of a rank along an axis of a role, `all` for all its ranks; None where the rank is alone in it."""
        found = (group for group in self.groups if (role, axis) in group.uses and rank in group.ranks)
        return next(found, None)

    def placed(self) -> str:
        """Which workers hold the model of each role, for people."""
        machines = len({rank.node for rank in self.ranks})
        roles = "; ".join(f"{layout.role} on {_listed(layout.ranks)}" for layout in self.layouts)
        return f"{len(self.ranks)} on {machines} machine{'s' if machines > 1 else ''}: {roles}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def _listed(ranks: Sequence[int]) -> str:
    side_by_side = ranks[-1] - ranks[0] == len(ranks) - 1 > 1
    return f"{ranks[0]} to {ranks[-1]}" if side_by_side else ", ".join(map(str, ranks))


def plan_local(pipeline: BoundPipeline, device: str) -> Plan:
    """Everything on one worker; the sample queue is where the planes meet."""
    rollout_nodes = [node.node_id for node in pipeline.rollout_nodes]
    rank = rank_plan(pipeline, 0, device, rollout_nodes, [node.node_id for node in pipeline.training_nodes])
    return Plan(pipeline.graph_id, (rank,), make_channels(pipeline, (rank,)))


def rank_plan(
    pipeline: BoundPipeline,
    rank: int,
    device: str,
    rollout_nodes: Sequence[str],
    training_nodes: Sequence[str],
    node: int = 0,
) -> RankPlan:
    """A worker that runs these nodes, with the engines and services that they name."""
    nodes = [pipeline.node(node_id) for node_id in (*rollout_nodes, *training_nodes)]
    engines = dict.fromkeys(engine for node in nodes for engine in node.engines)
    services = dict.fromkeys(service for node in nodes for service in node.contract.services)
    return RankPlan(rank, device, tuple(rollout_nodes), tuple(training_nodes), tuple(engines), tuple(services), node)


def check_plan(plan: Plan, pipeline: BoundPipeline) -> None:
    """Raises UserError for a node that the pipeline has not or that no rank runs, for one without its engine, for an
    engine that no node of its rank uses, and for a layout of other ranks than those that hold the engine."""
    for rank in plan.ranks:
        wanted = rank_plan(pipeline, rank.rank, rank.device, rank.rollout_nodes, rank.training_nodes)
        pairs = (("engine", rank.engines, wanted.engines), ("service", rank.services, wanted.services))
        for what, names, needed in pairs:
            unused = [name for name in names if name not in needed]
            missing = [name for name in needed if name not in names]
            if unused:
                raise UserError(
                    f"the plan gives rank {rank.rank} the {what} '{unused[0]}', which no node of pipeline "
                    f"'{pipeline.graph_id}' uses there: take it out of the plan"
                )
            if missing:
                raise UserError(
                    f"the plan gives rank {rank.rank} no {what} '{missing[0]}', which its nodes need: add it there"
                )
    placed = {node_id for rank in plan.ranks for node_id in (*rank.rollout_nodes, *rank.training_nodes)}
    idle = [node.node_id for node in pipeline.nodes if node.node_id not in placed]
    if idle:
        raise UserError(f"no rank of the plan runs node '{idle[0]}' of pipeline '{pipeline.graph_id}'")
    for layout in plan.layouts:
        holders = tuple(rank.rank for rank in plan.ranks if layout.role in rank.engines)
        if holders != layout.ranks:
            raise UserError(
                f"the plan lays the {layout.role} over ranks {layout.ranks}, and ranks {holders} use it: "
                "make them the same"
            )


def dp_groups_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Ranks that run the same nodes of the training loop: they share every step. The dp group that trains the policy
    is first: its first rank reports for all."""
    dp_groups: dict[tuple[str, ...], list[int]] = {}
    for rank in plan.ranks:
        if rank.training_nodes:
            dp_groups.setdefault(rank.training_nodes, []).append(rank.rank)
    found = [tuple(dp_group) for dp_group in dp_groups.values()]
    return tuple(sorted(found, key=lambda dp_group: "actor" not in plan.ranks[dp_group[0]].engines))


def make_channels(pipeline: BoundPipeline, ranks: Sequence[RankPlan]) -> tuple[Channel, ...]:
    """How each node gets the columns of another: by reference where every rank that runs it runs the other too."""
    homes: dict[str, set[int]] = {node.node_id: set() for node in pipeline.nodes}
    for rank in ranks:
        for node_id in (*rank.rollout_nodes, *rank.training_nodes):
            homes[node_id].add(rank.rank)
    rollout_nodes = {node.node_id for node in pipeline.rollout_nodes}
    found = []
    for node in pipeline.nodes:
        for dep in node.deps:
            crosses = dep in rollout_nodes and node.plane == "training"
            inside: ChannelKind = "local" if homes[node.node_id] <= homes[dep] else "exchange"
            found.append(Channel(dep, node.node_id, "stream" if crosses else inside))
    return tuple(found)
