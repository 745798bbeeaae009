"""The `torch.distributed` process groups of a training worker, created once and in the same order
on every rank, and the collectives over them."""

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.models.sharding import (
    DATA,
    EXPERT,
    EXPERT_SHARD,
    REPLICA,
    SHARD,
    TENSOR,
    Sharding,
)
from distflow.observe.writing.timing import COLLECTIVE, RANKS, Waits
from distflow.planning.layouts import Axis, Layout
from distflow.planning.plan import Plan
from distflow.runtime.dp_groups import dp_group_layout
from distflow.runtime.spec import Spec
from distflow.runtime.worker_place import Place
from distflow.training.engine import Collective, OneRank, Plain, Reducible


def backend_of(plan: Plan) -> str:
    """The argument of `init_process_group`. Beside nccl or the backend of another accelerator, gloo
    transfers host memory, including pickled objects."""
    for device in {torch.device(rank.device).type for rank in plan.ranks} - {"cpu", "cuda"}:
        return f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    if plan.backends == ("nccl", "gloo"):
        return "cpu:gloo,cuda:nccl"
    return plan.backends[0]


def new_meeting(run_dir: Path) -> Path:
    """A file through which the training workers of a start find each other. For the process that
    holds the folder: it removes those of killed starts, and the folders of their shared servers."""
    remove_meetings(run_dir)
    return run_dir / f".meeting-{secrets.token_hex(4)}"


def remove_meetings(run_dir: Path) -> None:
    for left in run_dir.glob(".meeting-*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)


class ProcessGroups:
    def __init__(
        self, plan: Plan, dp_groups: Sequence[tuple[int, ...]], timeout: timedelta
    ) -> None:
        """dp_groups: the training ranks, in the order of their common process group, which exists
        already. timeout: how long one may wait for the others. All of them call this."""
        self._plan = plan
        self._timeout = timeout
        self._training_ranks = list(chain.from_iterable(dp_groups))
        names = {group.ranks: group.name for group in plan.groups}
        self._groups = {}

        for ranks in dict.fromkeys([*names, *dp_groups]):
            if len(ranks) > 1 and set(ranks) <= set(self._training_ranks):
                places = self._places(ranks)
                group = dist.new_group(places, timeout, group_desc=names.get(ranks))
                self._groups[ranks] = group

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of these ranks: this one, with or without others."""
        if ranks not in self._groups:
            assert len(ranks) == 1, f"the plan has no process group of the ranks {ranks}"
            self._groups[ranks] = dist.new_group(
                self._places(ranks), self._timeout, use_local_synchronization=True
            )
        return self._groups[ranks]

    def sharding(
        self, dp_group: tuple[int, ...], layout: Layout, rank: int, device: str
    ) -> Sharding:
        """How the models of a dp group are sharded: over ranks with different tokens (two
        dimensions with replicas), and the tensor parallel ones if layers or experts are divided;
        experts over a mesh of their own."""
        sizes = layout.sizes
        context = None
        if sizes.context > 1:
            context = self.of(layout.line("context", rank))

        dense: dict[str, Axis] = {DATA: "tokens"}
        experts: dict[str, Axis] = {}
        if layout.shard is not None:
            dense = {REPLICA: "replica", SHARD: "shard"}
            experts = {REPLICA: "replica"}
        if sizes.tensor > 1 or sizes.expert > 1:
            dense[TENSOR] = "tensor"
        if len(dense) == 1:
            return Sharding(DeviceMesh.from_group(self.of(dp_group), device), context=context)

        mesh = self._mesh(dense, layout, rank, device)
        if sizes.expert == 1:
            return Sharding(mesh, context=context)

        experts |= {EXPERT_SHARD: "expert_shard", EXPERT: "expert"}
        return Sharding(mesh, experts=self._mesh(experts, layout, rank, device), context=context)

    def _mesh(self, axes: dict[str, Axis], layout: Layout, rank: int, device: str) -> DeviceMesh:
        lines = [layout.line(axis, rank) for axis in axes.values()]
        groups = [self.of(line) for line in lines]
        places = torch.tensor(self._places(layout.ranks)).view([len(line) for line in lines])
        return DeviceMesh.from_group(groups, device, mesh=places, mesh_dim_names=tuple(axes))

    def _places(self, ranks: Sequence[int]) -> list[int]:
        return [self._training_ranks.index(rank) for rank in ranks]


class TorchCollective:
    """The `Collective` of a process group: tensors are reduced on their device, numbers in float64.
    `sum` and `max` raise ValueError if the ranks' numbers have different names. waits: where to
    record the time that calls take."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: None for the group of all ranks."""
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self.waits = Waits()
        over_gloo = "gloo" in dist.get_backend_config(group)
        self._device = torch.device("cpu" if over_gloo else "cuda")  # NCCL cannot use host memory

    def sum(self, value: Reducible) -> Reducible:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Reducible) -> Reducible:
        return self._reduce(value, dist.ReduceOp.MAX)

    def gather(self, value: Plain) -> list[Plain]:
        """See `Collective`. Uses pickle, since only the ranks themselves can write to the group."""
        everyone: list[Plain] = [value] * self.size
        with self.waits("training", COLLECTIVE, on=RANKS):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def _reduce(self, value: Reducible, op: dist.ReduceOp.RedOpType) -> Reducible:
        if isinstance(value, Tensor):
            return self._all_reduce(value.detach().clone(), op)
        if not isinstance(value, dict):
            return self._all_reduce(self._numbers([value]), op).item()

        everyone = self.gather(value)
        odd = set[str]()
        for values in everyone:
            odd |= values.keys() ^ value.keys()

        if odd:
            raise ValueError(
                f"ranks reduce values with different names: only some have {sorted(odd)}"
            )

        reduce = sum if op is dist.ReduceOp.SUM else max
        return {name: reduce(values[name] for values in everyone) for name in value}

    def _numbers(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        with self.waits("training", COLLECTIVE, on=RANKS):
            dist.all_reduce(tensor, op, group=self._group)
        return tensor


@dataclass(frozen=True)
class Collectives:
    """everyone: all training ranks. dp_group: this rank's. data: ranks of the dp group with
    separate samples. sharding: of the dp group's models if weights are sharded, else None."""

    everyone: Collective
    dp_group: Collective
    data: Collective
    sharding: Sharding | None

    def record(self, waits: Waits) -> None:
        """Record the waits for other ranks from now on."""
        for each in (self.everyone, self.dp_group, self.data):
            if isinstance(each, TorchCollective):
                each.waits = waits

    @staticmethod
    def join(spec: Spec, place: Place, meeting: Path) -> "Collectives":
        """All training workers call this, and wait for each other. meeting: a file through which
        they meet."""
        if len({rank.node for rank in spec.plan.ranks}) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else needs to reach it
        trainers = place.trainers
        shards = spec.config.actor_rollout_ref.actor.strategy == "fsdp"
        if not place.dp_group or (len(trainers) == 1 and not shards):
            alone = OneRank()
            return Collectives(alone, alone, alone, None)

        device = torch.device(spec.plan.ranks[place.rank].device).type

        # A file, not a port: only those who can read the run's folder can join.
        store = dist.FileStore(str(meeting), len(trainers))
        timeout = timedelta(seconds=spec.config.trainer.peers_timeout_s)
        dist.init_process_group(
            backend_of(spec.plan),
            timeout=timeout,
            store=store,
            rank=trainers.index(place.rank),
            world_size=len(trainers),
        )
        groups = ProcessGroups(spec.plan, place.dp_groups, timeout)
        layout = dp_group_layout(spec.plan, place.dp_group)

        return Collectives(
            TorchCollective(),
            TorchCollective(groups.of(place.dp_group)),
            TorchCollective(groups.of(layout.line("data", place.rank))),
            groups.sharding(place.dp_group, layout, place.rank, device) if shards else None,
        )
