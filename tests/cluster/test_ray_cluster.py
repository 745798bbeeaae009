"""What a plan needs of a Ray that is started for it."""

import os

import pytest

from distflow.cluster.ray_cluster import check_room
from distflow.errors import UserError
from distflow.planning.plan import Plan, RankPlan


def plan(num_workers: int, num_nodes: int = 1, device: str = "cpu") -> Plan:
    ranks = [
        RankPlan(rank, device, (), (), (), (), rank % num_nodes) for rank in range(num_workers)
    ]
    return Plan("any", tuple(ranks), ())


def test_workers_may_share_cores_up_to_some_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_room(plan(8))
    check_room(plan(40, device="cuda"))  # whether these are there, Ray knows
    with pytest.raises(
        UserError, match=r"40 workers .* this machine has 2 cores, which 8 can share .* RAY_ADDRESS"
    ):
        check_room(plan(40))


def test_several_machines_are_no_plan_for_one() -> None:
    with pytest.raises(UserError, match=r"the plan is for 2 machines .* RAY_ADDRESS is not set"):
        check_room(plan(2, num_nodes=2))
