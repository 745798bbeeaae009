"""The plan of a run: the nodes of each rank, the channels between them, the layout of each model (a
role's ranks as a mesh), and the process groups of the ranks.

Plain frozen data that needs no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

from distflow.errors import UserError, count_of
from distflow.graph import BoundPipeline

Axis = Literal["data", "tensor", "pipeline", "context", "expert"]
AXES: tuple[Axis, ...] = ("data", "tensor", "pipeline", "context", "expert")
Part = Literal["shard", "replica"]
"""Axes within the ranks along data."""

# Outermost first: ranks that differ only in the last axis are neighbours.
_TRAINING: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")
_INFERENCE: tuple[Axis, ...] = ("data", "pipeline", "context", "tensor")


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis. expert: how many ranks along data × context share the
    experts."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Layout:
    """The layout of one role's model. ranks: all that hold a part of it, ascending; as many as
    `sizes` requires.

    shard: number of neighbours along data that share one copy of the weights; others hold replicas.
    None for all.
    """

    role: str
    engine: str
    ranks: tuple[int, ...]
    sizes: Sizes
    shard: int | None = None

    def place(self, rank: int) -> dict[Axis, int]:
        """The coordinates of one of its ranks. Order of ranks: pipeline → data → context → tensor
        for training, data → pipeline → context → tensor for inference, the last one fastest."""
        return self._places()[rank]

    def line(self, axis: Axis | Part, rank: int) -> tuple[int, ...]:
        """The ranks that differ from one of its ranks only along that axis, including itself,
        ascending."""
        return _line_of(self, axis)[rank]

    def groups(self, axis: Axis | Part) -> list[tuple[int, ...]]:
        """The ranks that differ only along that axis, one tuple for each coordinate of the others,
        each ascending.

        Experts are shared by `sizes.expert` neighbours among the ranks that differ along data and
        context. Along data, `shard` groups neighbours that share one copy of the weights, `replica`
        ranks that have the same part.
        """
        size = self.shard or self.sizes.data
        if axis == "expert":
            return _neighbours(self._lines("data", "context"), self.sizes.expert)
        if axis == "shard":
            return _neighbours(self._lines("data"), size)
        if axis == "replica":
            found: list[tuple[int, ...]] = []
            for line in self._lines("data"):
                for place in range(size):
                    found.append(line[place::size])
            return found
        return self._lines(axis)

    def _lines(self, *along: Axis) -> list[tuple[int, ...]]:
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self._places().items():
            others = tuple(index for axis, index in place.items() if axis not in along)
            lines.setdefault(others, []).append(rank)
        return [tuple(line) for line in lines.values()]

    def _places(self) -> dict[int, dict[Axis, int]]:
        """The coordinates of each rank."""
        assert self.sizes.num_devices == len(self.ranks), (
            f"{self.role} has {len(self.ranks)} ranks for {self.sizes}"
        )
        axes = _INFERENCE if self.role == "rollout" else _TRAINING
        places = product(*(range(getattr(self.sizes, axis)) for axis in axes))
        return {
            rank: dict(zip(axes, place, strict=True))
            for rank, place in zip(self.ranks, places, strict=True)
        }


@lru_cache(maxsize=64)
def _line_of(layout: Layout, axis: Axis | Part) -> dict[int, tuple[int, ...]]:
    """By rank; every rank of a large cluster asks for its own."""
    found: dict[int, tuple[int, ...]] = {}
    for line in layout.groups(axis):
        for rank in line:
            found[rank] = line
    return found


def _neighbours(lines: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for line in lines:
        for start in range(0, len(line), size):
            found.append(line[start : start + size])
    return found


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that communicate. uses: each (role, axis) that they form; the axis `all` is the role's
    whole mesh."""

    name: str
    ranks: tuple[int, ...]
    uses: tuple[tuple[str, str], ...]


def process_groups(layouts: Sequence[Layout]) -> tuple[ProcessGroup, ...]:
    """Every group of at least two ranks, once for all its uses: `process_group_1`, ... in the order
    in which each rank must create them."""
    uses: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for layout in layouts:
        axes: tuple[Axis | Part, ...] = (*AXES, "replica", "shard") if layout.shard else AXES
        lines = [
            ("all", layout.ranks),
            *((axis, line) for axis in axes for line in layout.groups(axis)),
        ]
        for axis, ranks in lines:
            if len(ranks) > 1:
                uses.setdefault(tuple(sorted(ranks)), []).append((layout.role, axis))
    return tuple(
        ProcessGroup(f"process_group_{number}", ranks, tuple(used))
        for number, (ranks, used) in enumerate(sorted(uses.items()), start=1)
    )


def choose_backends(device: str, num_ranks: int, threshold: int) -> tuple[Backend, ...]:
    """The backends, that for tensors first; from `threshold` ranks on, gloo is added to nccl for
    objects."""
    if not device.startswith("cuda"):
        return ("gloo",)
    return ("nccl", "gloo") if num_ranks >= threshold else ("nccl",)


ChannelKind = Literal["local", "stream", "exchange"]


@dataclass(frozen=True)
class Channel:
    """How one node's output reaches another: by reference on one worker (`local`), over the sample
    queue (`stream`), or resharded over ranks (`exchange`)."""

    source: str
    target: str
    kind: ChannelKind


@dataclass(frozen=True)
class RankPlan:
    """A worker's nodes by plane, in order, and the engines and services that they need. node: its
    machine. rollout_group: the ranks on whose devices its rollout engine computes, if there are
    several."""

    rank: int
    device: str
    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    engines: tuple[str, ...]
    services: tuple[str, ...]
    node: int = 0
    rollout_group: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Placement of a pipeline.

    layouts: of each role's model, if there are several ranks. groups: their process groups, in the
    order in which every rank creates them. backends: of these groups, that for tensors first.
    """

    pipeline: str
    ranks: tuple[RankPlan, ...]
    channels: tuple[Channel, ...]
    layouts: tuple[Layout, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    backends: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether some worker has the rollout engine."""
        return any("rollout" in rank.engines for rank in self.ranks)

    def layout(self, role: str) -> Layout | None:
        """The layout of a role's model; None for a role that the plan does not place, and for a
        single rank."""
        return next((layout for layout in self.layouts if layout.role == role), None)

    def placed(self) -> str:
        """Text that says which workers hold the model of each role."""
        machines = len({rank.node for rank in self.ranks})
        roles = "; ".join(f"{layout.role} on {_listed(layout.ranks)}" for layout in self.layouts)
        return f"{len(self.ranks)} on {count_of(machines, 'machine')}: {roles}"


def _listed(ranks: Sequence[int]) -> str:
    side_by_side = ranks[-1] - ranks[0] == len(ranks) - 1 > 1
    return f"{ranks[0]} to {ranks[-1]}" if side_by_side else ", ".join(map(str, ranks))


def plan_local(pipeline: BoundPipeline, device: str) -> Plan:
    rollout_nodes, training_nodes = (
        [node.node_id for node in nodes]
        for nodes in (pipeline.rollout_nodes, pipeline.training_nodes)
    )
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
    nodes = [pipeline.node(node_id) for node_id in (*rollout_nodes, *training_nodes)]
    engines = dict.fromkeys(engine for node in nodes for engine in node.engines)
    services = dict.fromkeys(service for node in nodes for service in node.contract.services)
    return RankPlan(
        rank,
        device,
        tuple(rollout_nodes),
        tuple(training_nodes),
        tuple(engines),
        tuple(services),
        node,
    )


def check_plan(plan: Plan, pipeline: BoundPipeline) -> None:
    """Raises UserError for a node that the pipeline lacks or no rank runs, a missing engine or
    service, one that no node of its rank uses, and a layout whose ranks are not those with the
    engine."""
    for rank in plan.ranks:
        wanted = rank_plan(
            pipeline, rank.rank, rank.device, rank.rollout_nodes, rank.training_nodes
        )
        pairs = (
            ("engine", rank.engines, wanted.engines),
            ("service", rank.services, wanted.services),
        )
        for what, names, needed in pairs:
            for name in (name for name in names if name not in needed):
                raise UserError(
                    f"the plan gives rank {rank.rank} the {what} '{name}', which no node of "
                    "pipeline "
                    f"'{pipeline.graph_id}' uses there: remove it from the plan"
                )
            for name in (name for name in needed if name not in names):
                raise UserError(
                    f"the plan gives rank {rank.rank} no {what} '{name}', which its nodes need: "
                    "add it"
                )
    placed = {
        node_id for rank in plan.ranks for node_id in (*rank.rollout_nodes, *rank.training_nodes)
    }
    idle = [node.node_id for node in pipeline.nodes if node.node_id not in placed]
    if idle:
        raise UserError(
            f"no rank of the plan runs node '{idle[0]}' of pipeline '{pipeline.graph_id}'"
        )
    for layout in plan.layouts:
        holders = tuple(rank.rank for rank in plan.ranks if layout.role in rank.engines)
        if holders != layout.ranks:
            raise UserError(
                f"the plan lays the {layout.role} over ranks {layout.ranks}, but ranks {holders} "
                "use it: use the "
                "same ranks"
            )


def dp_groups_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
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
    homes = {
        node.node_id: {
            rank.rank
            for rank in ranks
            if node.node_id in (*rank.rollout_nodes, *rank.training_nodes)
        }
        for node in pipeline.nodes
    }
    rollout_nodes = {node.node_id for node in pipeline.rollout_nodes}
    found = []
    for node in pipeline.nodes:
        for dep in node.deps:
            crosses = dep in rollout_nodes and node.plane == "training"
            inside: ChannelKind = "local" if homes[node.node_id] <= homes[dep] else "exchange"
            found.append(Channel(dep, node.node_id, "stream" if crosses else inside))
    return tuple(found)
