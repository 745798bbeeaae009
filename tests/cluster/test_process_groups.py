"""The process groups of real gloo ranks, and which share of a step each of them takes."""

import json

import pytest

from distflow.cluster.process_groups import backend_of
from distflow.planning.layouts import Layout, Sizes
from distflow.planning.plan import Plan
from distflow.runtime.dp_groups import dp_group_layout
from tests.ranks import run_ranks


@pytest.mark.slow
def test_groups_of_the_plan_are_made_once_and_meshes_from_them(tmp_path):
    run_ranks("tests.cluster.process_groups_worker", 4, tmp_path)
    found = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (1, 2, 3, 4)}
    assert all(each.pop("met") for each in found.values()), (
        "nobody leaves a barrier before all have come"
    )
    assert found[1] == {"dp_group": 3.0, "data": 1.0, "shape": [1, 2], "coordinate": [0, 0]}
    assert found[2] == {"dp_group": 3.0, "data": 2.0, "shape": [1, 2], "coordinate": [0, 1]}
    assert found[3] == found[4] == {"dp_group": 7.0, "data": 7.0, "shape": [2]}


def test_gloo_is_beside_nccl_where_the_plan_says_so():
    def plan(*backends: str) -> Plan:
        return Plan("grpo", (), (), backends=backends)

    assert backend_of(plan("nccl", "gloo")) == "cpu:gloo,cuda:nccl"
    assert (backend_of(plan("nccl")), backend_of(plan("gloo"))) == ("nccl", "gloo")


def test_ranks_without_a_model_have_shares_of_their_own():
    rollout = Layout("rollout", "embedded", (0, 1), Sizes(tensor=2))
    found = dp_group_layout(Plan("sft", (), (), (rollout,)), (0, 1))
    assert [found.data_place(rank) for rank in (0, 1)] == [0, 1]
