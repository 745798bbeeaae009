"""Places of ranks and their process groups."""

import numpy as np
import pytest

from distflow.planning.layouts import (
    Layout,
    Sizes,
    alternatives,
    choose_backends,
    process_groups,
)


def layout(sizes: Sizes, role: str = "actor", first: int = 0) -> Layout:
    return Layout(role, "fsdp", tuple(range(first, first + sizes.num_devices)), sizes)


def test_ranks_need_not_begin_at_0_or_be_neighbours() -> None:
    found = Layout("actor", "fsdp", (3, 5, 6, 9), Sizes(data=2, tensor=2))
    places = [(found.data_place(rank), found.sample_place(rank)) for rank in found.ranks]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.line("data", 5) == (5, 9) and found.line("tensor", 5) == (3, 5)


def test_lines_are_those_of_an_array() -> None:
    found = layout(Sizes(data=4, tensor=3))
    array = np.arange(12).reshape(4, 3)
    for rank in found.ranks:
        data, tensor = (int(place[0]) for place in np.where(array == rank))
        assert found.line("data", rank) == tuple(array[:, tensor])
        assert found.line("tensor", rank) == tuple(array[data])


def test_ranks_that_divide_rows_lie_between_data_and_tensor() -> None:
    found = layout(Sizes(data=2, context=3, tensor=2))
    array = np.arange(12).reshape(2, 3, 2)
    for rank in found.ranks:
        data, context, tensor = (int(place[0]) for place in np.where(array == rank))
        assert found.data_place(rank) == data
        assert found.line("data", rank) == tuple(array[:, context, tensor])
        assert found.line("context", rank) == tuple(array[data, :, tensor])
        assert found.line("tokens", rank) == tuple(array[:, :, tensor].flatten())

    assert [rank for rank in found.ranks if found.sample_place(rank) == 0] == [0, 6]
    assert {group.ranks for group in process_groups([found])} >= {(0, 2, 4), (7, 9, 11), (0, 6)}


def test_ranks_along_data_share_one_copy_of_the_weights_or_hold_the_same_part_of_it() -> None:
    found = Layout("actor", "fsdp", tuple(range(8)), Sizes(data=4, tensor=2), shard=2)
    assert found.line("replica", 6) == (2, 6) and found.line("shard", 1) == (1, 3)
    pairs = {group.ranks for group in process_groups([found]) if len(group.ranks) == 2}
    assert pairs >= {(0, 2), (4, 6), (1, 3), (5, 7), (0, 4), (2, 6), (1, 5), (3, 7)}
    whole = Layout("actor", "fsdp", tuple(range(4)), Sizes(data=4))
    assert whole.line("shard", 2) == (0, 1, 2, 3) and whole.line("replica", 2) == (2,)


def test_ranks_with_different_experts_are_neighbours_and_others_share_theirs() -> None:
    """As in an array of (copies of the weights, ranks with the same experts, experts)."""
    found = Layout("actor", "fsdp", tuple(range(16)), Sizes(data=8, tensor=2, expert=4), shard=4)
    array = np.arange(16).reshape(2, 2, 4)
    for rank in found.ranks:
        replica, same, own = (int(place[0]) for place in np.where(array == rank))
        assert found.line("expert", rank) == tuple(array[replica, same])
        assert found.line("expert_shard", rank) == tuple(array[replica, :, own])
        assert found.line("replica", rank) == tuple(array[:, same, own])

    ranks = {group.ranks for group in process_groups([found])}
    assert ranks >= {(0, 1, 2, 3), (12, 13, 14, 15), (3, 7), (8, 12)}


def test_alternatives_are_all_that_as_many_devices_allow_the_nearest_first() -> None:
    found = alternatives(Sizes(data=2, tensor=2, expert=2))
    assert found[0] == Sizes(data=2, tensor=2, expert=2)
    assert {str(sizes) for sizes in found} == {
        *("d4", "d4e2", "d4e4"),
        *("d2t2", "d2t2e2", "d2t2e4"),
        *("d1t4", "d1t4e4"),
    }
    assert str(alternatives(Sizes(data=4, expert=3))[0]) == "d4e4"
    rows = [str(sizes) for sizes in alternatives(Sizes(data=2, context=2)) if sizes.expert == 1]
    assert rows[:2] == ["d2c2", "d4"] and "d1c4" not in rows


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


def test_a_rank_alone_has_no_group() -> None:
    assert process_groups([layout(Sizes()), layout(Sizes(), "rollout", 1)]) == ()


@pytest.mark.parametrize(
    ("device", "num_ranks", "backends"),
    [
        ("cpu", 64, ("gloo",)),
        ("cuda", 31, ("nccl",)),
        ("cuda:0", 32, ("nccl", "gloo")),
    ],
)
def test_backends(device: str, num_ranks: int, backends: tuple[str, ...]) -> None:
    assert choose_backends(device, num_ranks, threshold=32) == backends
