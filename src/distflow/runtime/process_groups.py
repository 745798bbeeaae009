"""The process groups of a worker that learns: those of the plan, each made once, in one order on every rank."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.models.sharding import DATA, REPLICA, SHARD, TENSOR
from distflow.planning.layout import Axis, Layout, Part
from distflow.planning.plan import Plan


def backend_of(plan: Plan) -> str:
    """What `init_process_group` is given: gloo beside nccl carries what lies in the host's memory, objects among it."""
    return "cpu:gloo,cuda:nccl" if plan.backends == ("nccl", "gloo") else plan.backends[0]


class ProcessGroups:
    """By their ranks, as the plan counts them."""

    def __init__(self, plan: Plan, teams: Sequence[tuple[int, ...]], timeout: timedelta) -> None:
        """teams: the ranks that learn, in the order of the group of all of them, in which this one is already. timeout:
        that one may wait for the others. All of them call this."""
        self._plan, self._timeout = plan, timeout
        self._learners = [rank for team in teams for rank in team]
        planned = [group.ranks for group in plan.groups if set(group.ranks) <= set(self._learners)]
        self._made = {
            ranks: dist.new_group(self._places(ranks), timeout)
            for ranks in dict.fromkeys([*planned, *teams])
            if len(ranks) > 1
        }

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Of this rank and others, or of this rank alone."""
        if ranks not in self._made:
            assert len(ranks) == 1, f"no group of the plan has the ranks {ranks}"
            self._made[ranks] = dist.new_group(self._places(ranks), self._timeout, use_local_synchronization=True)
        return self._made[ranks]

    def mesh(self, team: tuple[int, ...], layout: Layout, rank: int, device: str) -> DeviceMesh:
        """Over which the models of a team are spread: of the data parallel dimension, or of the two that replicas make
        of it, and of the tensor parallel one where layers are divided."""
        data, tensor = layout.sizes.data, layout.sizes.tensor
        dimensions: dict[str, tuple[Axis | Part, int]] = {DATA: ("data", data)}
        if layout.shard is not None:
            dimensions = {REPLICA: ("replica", data // layout.shard), SHARD: ("shard", layout.shard)}
        if tensor > 1:
            dimensions[TENSOR] = ("tensor", tensor)
        if len(dimensions) == 1:
            return DeviceMesh.from_group(self.of(team), device)
        lines = [self.of(layout.line(axis, rank)) for axis, _ in dimensions.values()]
        places = torch.tensor(self._places(team)).view([size for _, size in dimensions.values()])
        return DeviceMesh.from_group(lines, device, mesh=places, mesh_dim_names=tuple(dimensions))

    def _places(self, ranks: Sequence[int]) -> list[int]:
        return [self._learners.index(rank) for rank in ranks]
