"""Coordinates of ranks, and process groups: the references of siiRL, and a mesh of torch's for the
rest."""

import numpy as np
import pytest

from distflow.planning.layouts import Layout, ProcessGroup, Sizes, choose_backends, process_groups
from distflow.planning.plan import Plan


def group_of(plan: Plan, role: str, axis: str, rank: int) -> ProcessGroup | None:
    """The group of a rank along an axis of a role, `all` for all its ranks; None if the rank is
    alone."""
    return next(
        (group for group in plan.groups if (role, axis) in group.uses and rank in group.ranks), None
    )


def layout(sizes: Sizes, role: str = "actor", first: int = 0) -> Layout:
    return Layout(role, "megatron", tuple(range(first, first + sizes.num_devices)), sizes)


def test_training_is_ordered_pp_dp_tp_and_inference_dp_pp_tp() -> None:
    sizes = Sizes(data=2, tensor=2, pipeline=2)
    where = [(dp, tp, pp) for dp in range(2) for tp in range(2) for pp in range(2)]
    for role, ranks in (("actor", [0, 4, 1, 5, 2, 6, 3, 7]), ("rollout", [0, 2, 1, 3, 4, 6, 5, 7])):
        places = [layout(sizes, role).place(rank) for rank in ranks]
        assert [(at["data"], at["tensor"], at["pipeline"]) for at in places] == where


def test_ranks_need_not_begin_at_0_or_be_neighbours() -> None:
    found = Layout("actor", "fsdp", (3, 5, 6, 9), Sizes(data=2, tensor=2))
    assert found.place(6) == {"data": 1, "tensor": 0, "pipeline": 0, "context": 0}
    assert found.groups("tensor") == [(3, 5), (6, 9)] and found.groups("data") == [(3, 6), (5, 9)]


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_groups_are_the_lines_of_an_array(role: str) -> None:
    """The same by NumPy: the array of ranks in the order of the axes, one axis moved to the end."""
    found = layout(Sizes(data=2, tensor=3, pipeline=2, context=2), role)
    order = ["data", "pipeline"] if role == "rollout" else ["pipeline", "data"]
    order += ["context", "tensor"]
    array = np.arange(24).reshape([getattr(found.sizes, axis) for axis in order])
    for axis in order:
        moved = np.moveaxis(array, order.index(axis), -1)
        wanted = {tuple(line) for line in moved.reshape(-1, moved.shape[-1]).tolist()}
        assert set(found.groups(axis)) == wanted  # type: ignore[arg-type]  # names of axes


def test_ranks_along_data_share_one_copy_of_the_weights_or_hold_the_same_part_of_it() -> None:
    found = Layout("actor", "fsdp", tuple(range(8)), Sizes(data=4, tensor=2), shard=2)
    assert found.groups("shard") == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert found.groups("replica") == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert found.line("replica", 6) == (2, 6) and found.line("shard", 1) == (1, 3)
    uses = {group.ranks: group.uses for group in process_groups([found])}
    assert uses[0, 2] == (("actor", "shard"),) and uses[3, 7] == (("actor", "replica"),)
    whole = Layout("actor", "fsdp", tuple(range(4)), Sizes(data=4))
    assert whole.groups("shard") == [(0, 1, 2, 3)] and whole.groups("replica") == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    assert [group.uses for group in process_groups([whole])] == [
        (("actor", "all"), ("actor", "data"))
    ]


def test_groups_are_named_in_one_order_and_shared_where_they_are_equal() -> None:
    actor = layout(Sizes(data=2, tensor=2))
    critic = layout(Sizes(data=4), "critic")
    found = process_groups([actor, critic, layout(Sizes(data=2), "rollout", 4)])
    assert [(group.name, group.ranks) for group in found] == [
        ("process_group_1", (0, 1)),
        ("process_group_2", (0, 1, 2, 3)),
        ("process_group_3", (0, 2)),
        ("process_group_4", (1, 3)),
        ("process_group_5", (2, 3)),
        ("process_group_6", (4, 5)),
    ]
    assert found[1].uses == (("actor", "all"), ("critic", "all"), ("critic", "data"))
    assert found[5] == ProcessGroup(
        "process_group_6", (4, 5), (("rollout", "all"), ("rollout", "data"))
    )


def test_a_rank_alone_has_no_group() -> None:
    assert process_groups([layout(Sizes()), layout(Sizes(), "rollout", 1)]) == ()


@pytest.mark.parametrize(
    ("device", "num_ranks", "backends"),
    [
        ("cpu", 4, ("gloo",)),
        ("cpu", 64, ("gloo",)),
        ("cuda", 31, ("nccl",)),
        ("cuda:0", 32, ("nccl", "gloo")),
        ("cuda", 512, ("nccl", "gloo")),
    ],
)
def test_backends(device: str, num_ranks: int, backends: tuple[str, ...]) -> None:
    assert choose_backends(device, num_ranks, threshold=32) == backends


def test_a_rank_knows_its_place_and_its_lines() -> None:
    found = Layout("actor", "fsdp", (3, 5, 6, 9), Sizes(data=2, tensor=2))
    assert [(found.place(rank)["data"], found.place(rank)["tensor"]) for rank in found.ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert found.line("data", 5) == (5, 9) and found.line("tensor", 5) == (3, 5)
