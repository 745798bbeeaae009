"""One of four gloo training ranks in two dp groups: 1 and 2 of the plan compute layers together, 3
and 4 do not."""

import json
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from distflow.cluster.process_groups import ProcessGroups, TorchCollective, backend_of
from distflow.graph import NodeType
from distflow.models.sharding import DATA, TENSOR
from distflow.planning.layouts import Layout, Sizes, process_groups
from distflow.planning.plan import Plan
from distflow.runtime.dp_groups import dp_group_layout
from tests.runtime.groups import context, group, step

LAYOUTS = (
    Layout("rollout", "embedded", (0,), Sizes()),
    Layout("actor", "fsdp", (1, 2), Sizes(tensor=2)),
    Layout("critic", "fsdp", (3, 4), Sizes(data=2)),
)
PLAN = Plan("ppo", (), (), LAYOUTS, process_groups(LAYOUTS), ("gloo",))
DP_GROUPS = ((1, 2), (3, 4))


def meet(is_late: bool, file: Path, resources: dict[str, object]) -> bool:
    """At a barrier. Whether what the first of the dp group writes, late, is there once the other
    continues."""
    barrier = step(None, resources, node_type=NodeType.BARRIER_SYNC)
    if is_late:
        time.sleep(0.5)
        file.touch()
    barrier(group(), context())
    return file.exists()


def main(place: int, folder: Path) -> None:
    rank = place + 1
    assert backend_of(PLAN) == dist.get_backend()
    groups = ProcessGroups(PLAN, DP_GROUPS, timedelta(minutes=5))
    dp_group = DP_GROUPS[place // 2]
    layout = dp_group_layout(PLAN, dp_group)
    data = layout.line("data", rank)
    tensor = layout.line("tensor", rank)
    assert groups.of(dp_group) is groups.of(tensor if dp_group == (1, 2) else data), (
        "equal ranks are one group"
    )
    data_line = TorchCollective(groups.of(data))
    everyone = TorchCollective(groups.of(dp_group))
    met = meet(place % 2 == 0, folder / f"{dp_group}", {"reduce": data_line, "dp_group": everyone})
    mesh = groups.sharding(dp_group, layout, rank, "cpu").mesh

    found: dict[str, object] = {
        "dp_group": TorchCollective(groups.of(dp_group)).sum(float(rank)),
        "data": TorchCollective(groups.of(data)).sum(float(rank)),
        "shape": list(mesh.shape),
        "met": met,
    }
    if dp_group == (1, 2):
        assert mesh.mesh_dim_names == (DATA, TENSOR)
        assert mesh[TENSOR].get_group() is groups.of(tensor) and mesh[
            DATA
        ].get_group() is groups.of(data)
        found["coordinate"] = mesh.get_coordinate()

    (folder / f"{rank}.json").write_text(json.dumps(found))
