"""What a plan needs of a Ray that is started for it."""

import os

import pytest
import ray

from distflow.cluster.ray_cluster import _fits, check_room
from distflow.errors import UserError
from distflow.planning.plan import Plan, RankPlan


def plan(num_workers: int, num_nodes: int = 1, device: str = "cpu") -> Plan:
    ranks = [
        RankPlan(rank, device, (), (), (), (), rank % num_nodes) for rank in range(num_workers)
    ]
    return Plan("any", tuple(ranks), ())


def test_workers_may_share_cores_up_to_some_number(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_room(plan(8))
    check_room(plan(40, device="cuda"))  # whether these are there, Ray knows

    with pytest.raises(UserError, match=r"40 workers .* 2 cores, .* 8 .* RAY_ADDRESS"):
        check_room(plan(40))


def test_several_machines_are_no_plan_for_one():
    with pytest.raises(UserError, match=r" 2 machines .* RAY_ADDRESS"):
        check_room(plan(2, num_nodes=2))


def test_what_no_machine_has_is_not_waited_for(monkeypatch):
    """Two machines with a device each have room for two bundles of one, and for none of two."""
    machine = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [machine, dict(machine)])
    assert _fits([{"CPU": 1.0, "GPU": 1.0}] * 2)
    assert not _fits([{"CPU": 1.0, "GPU": 2.0}])
    assert not _fits([{"CPU": 1.0, "GPU": 1.0}] * 3)
