"""One of four gloo ranks that learn, in two teams: 1 and 2 of the plan compute layers together, 3 and 4 do not."""

import json
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from distflow.models.sharding import DATA, TENSOR
from distflow.planning.groups import process_groups
from distflow.planning.layout import Layout, Sizes
from distflow.planning.plan import Plan
from distflow.runtime.ports.torch_collective import TorchCollective
from distflow.runtime.process_groups import ProcessGroups, backend_of
from distflow.runtime.teams import team_layout

LAYOUTS = (
    Layout("rollout", "embedded", (0,), Sizes()),
    Layout("actor", "fsdp", (1, 2), Sizes(tensor=2)),
    Layout("critic", "fsdp", (3, 4), Sizes(data=2)),
)
PLAN = Plan("ppo", (), (), LAYOUTS, process_groups(LAYOUTS), ("gloo",))
TEAMS = ((1, 2), (3, 4))


def main(place: int, folder: Path) -> None:
    rank = place + 1
    assert backend_of(PLAN) == dist.get_backend()
    groups, team = ProcessGroups(PLAN, TEAMS, timedelta(minutes=5)), TEAMS[place // 2]
    layout = team_layout(PLAN, team)
    data, tensor = layout.line("data", rank), layout.line("tensor", rank)
    assert groups.of(team) is groups.of(tensor if team == (1, 2) else data), "equal ranks are one group"
    mesh = groups.mesh(team, layout, rank, "cpu")
    found: dict[str, object] = {
        "team": TorchCollective(groups.of(team)).sum(float(rank)),
        "data": TorchCollective(groups.of(data)).sum(float(rank)),
        "shape": list(mesh.shape),
    }
    if team == (1, 2):
        assert mesh.mesh_dim_names == (DATA, TENSOR)
        assert mesh[TENSOR].get_group() is groups.of(tensor) and mesh[DATA].get_group() is groups.of(data)
        found["coordinate"] = mesh.get_coordinate()
    (folder / f"{rank}.json").write_text(json.dumps(found))
