"""The process groups that a worker is in, and what it asks of the others through them."""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.runtime.place import Place
from distflow.runtime.ports.torch_collective import TorchCollective
from distflow.runtime.process_groups import ProcessGroups, backend_of
from distflow.runtime.spec import Spec
from distflow.runtime.teams import team_layout
from distflow.training.collective import Collective, OneRank


@dataclass(frozen=True)
class Collectives:
    """everyone: all that learn. team: those that learn the same. data: those of the team that have samples of their
    own. mesh: of the team where weights are sharded, else None."""

    everyone: Collective
    team: Collective
    data: Collective
    mesh: DeviceMesh | None

    @staticmethod
    def joined(spec: Spec, place: Place, meeting: Path) -> "Collectives":
        """All that learn call this, and wait for each other. meeting: a file over which they find each other."""
        learners = place.learners
        shards = spec.config.actor_rollout_ref.actor.strategy == "fsdp"
        if not place.team or (len(learners) == 1 and not shards):
            alone = OneRank()
            return Collectives(alone, alone, alone, None)
        if len({rank.node for rank in spec.plan.ranks}) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else has to reach it
        device = torch.device(spec.plan.ranks[place.rank].device).type
        # A file, not a port: who cannot read the run's folder cannot take part.
        store = dist.FileStore(str(meeting), len(learners))
        timeout = timedelta(seconds=spec.options.peers_timeout_s)
        dist.init_process_group(
            backend_of(spec.plan),
            timeout=timeout,
            store=store,
            rank=learners.index(place.rank),
            world_size=len(learners),
        )
        groups, layout = ProcessGroups(spec.plan, place.teams, timeout), team_layout(spec.plan, place.team)
        return Collectives(
            TorchCollective(),
            TorchCollective(groups.of(place.team)),
            TorchCollective(groups.of(layout.line("data", place.rank))),
            groups.mesh(place.team, layout, place.rank, device) if shards else None,
        )
