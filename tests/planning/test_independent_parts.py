"""Parts of a pipeline, split, given devices and placed: the references, and random graphs and
clusters against brute force. Sizes of models, as written."""

import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import UserError
from distflow.graph.node_order import ancestors
from distflow.planning.independent_parts import Part, apportion, parse_size, priority, split
from distflow.planning.place_parts import place

Graph = tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]


def test_graphs_that_siirl_cuts_at_their_joins_keep_each_input():
    """Those of its tests: two beginnings that meet, and joins before a fork, of which it makes two
    and six chains."""
    meeting = {
        "A": (),
        "B": ("A",),
        "A1": (),
        "B1": ("A1",),
        "C": ("B", "B1"),
        "D": ("C",),
        "E": ("D",),
    }
    assert split(meeting, {}) == [("A", "B", "A1", "B1", "C", "D", "E")]
    joined = {
        "X": (),
        "Y": (),
        "P1": ("X",),
        "P2": ("Y",),
        "M1": ("P1", "P2"),
        "P3": (),
        "Z": ("M1", "P3"),
    }
    both = {**joined, "J1": ("Z",), "J2": ("Z",), "K1": ("J1",), "K2": ("J2",)}
    assert [set(part) for part in split(both, {})] == [{*joined, "J1", "K1"}, {*joined, "J2", "K2"}]


def test_what_is_there_once_keeps_its_users_together():
    fork = {"load": (), "left": ("load",), "right": ("load",), "third": ("load",)}
    assert split(fork, {"left": ["actor"], "third": ["actor"], "right": ["critic"]}) == [
        ("load", "left", "third"),
        ("load", "right"),
    ]
    assert split(fork, {"load": ["rollout"]}) == [("load", "left", "right", "third")]

    # the last exit joins two that had nothing in common
    assert split(
        {"a": (), "b": (), "c": ("a", "b"), "d": ("a",), "e": ("b",)},
        {"a": ["x"], "b": ["y"], "d": ["x"], "e": ["y"]},
    ) == [("a", "b", "c", "d", "e")]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Edges, and what some nodes hold."""
    num = draw(st.integers(1, 8))
    deps = {
        f"n{j}": tuple(f"n{i}" for i in range(j) if draw(st.integers(0, 2)) == 0)
        for j in range(num)
    }
    holds: dict[str, tuple[str, ...]] = {
        node: (draw(st.sampled_from("xyz")),) for node in deps if draw(st.booleans())
    }

    return deps, holds


def held_by(nodes: set[str], holds: dict[str, tuple[str, ...]]) -> set[str]:
    return {held for node in nodes for held in holds.get(node, ())}


@settings(derandomize=True, deadline=None)
@given(graphs())
def test_parts_are_whole_independent_and_irreducible(graph):
    deps, holds = graph
    parts = [set(part) for part in split(deps, holds)]
    assert set().union(*parts) == set(deps)
    before = ancestors(deps)
    assert all(before[node] <= part for part in parts for node in part), (
        "an input of a join was lost"
    )
    assert not any(held_by(one, holds) & held_by(two, holds) for one, two in combinations(parts, 2))
    exits = {node for node in deps if not any(node in ids for ids in deps.values())}

    for part in parts:
        own = sorted(exits & part)
        for size in range(1, len(own)):
            for some in combinations(own, size):
                one, two = (
                    {*here, *(b for e in here for b in before[e])}
                    for here in (some, set(own) - set(some))
                )
                assert held_by(one, holds) & held_by(two, holds), "it could have been two parts"

    assert split(deps, holds) == split(dict(deps), dict(holds))


def test_parts_are_served_by_size_and_then_by_length():
    small = Part(("a",), (), 1)
    long = Part(("b", "c"), (), 1)
    large = Part(("d",), (), 9)
    assert sorted([small, long, large], key=priority) == [large, long, small]
    twin = Part(("e",), (), 1)
    assert sorted([small, twin], key=priority) == [small, twin] and sorted(
        [twin, small], key=priority
    ) == [twin, small]


@pytest.mark.parametrize(
    ("sizes", "num_devices", "strategy", "shares"),
    [
        ((600e9, 1e6), 8, "param_aware", [7, 1]),
        ((300, 200, 100), 10, "param_aware", [5, 3, 2]),
        ((1, 1), 3, "param_aware", [2, 1]),
        ((0, 0), 5, "param_aware", [3, 2]),
        ((5, 0), 4, "param_aware", [3, 1]),
        ((600e9, 1e6), 8, "even", [4, 4]),
        ((3, 2, 1), 8, "even", [3, 3, 2]),
        ((7,), 6, "param_aware", [6]),
        ((100, 1, 1, 1), 4, "param_aware", [1, 1, 1, 1]),
        ((100e6, 50e6), 4, "param_aware", [3, 1]),
        ((100e6, 50e6), 4, "even", [2, 2]),
        ((300e6, 10e6), 4, "param_aware", [3, 1]),
        ((30, 20, 10), 10, "even", [4, 3, 3]),
        ((0, 0), 10, "param_aware", [5, 5]),
        ((10, 10, 10, 10, 10), 5, "even", [1, 1, 1, 1, 1]),
        ((), 10, "param_aware", []),
    ],
)
def test_shares(sizes, num_devices, strategy, shares):
    assert apportion(sizes, num_devices, strategy) == shares


def test_parts_without_a_device_are_refused():
    with pytest.raises(UserError, match="3 independent parts, .* 2 devices: .* 3"):
        apportion((1, 1, 1), 2, "even")


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=6),
    st.integers(0, 30),
    st.sampled_from(["even", "param_aware"]),
)
def test_no_part_is_empty_and_larger_ones_have_no_less(sizes, more, strategy):
    sizes = sorted(sizes, reverse=True)
    shares = apportion(sizes, len(sizes) + more, strategy)
    assert sum(shares) == len(sizes) + more and min(shares) >= 1
    assert shares == sorted(shares, reverse=True)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 30))
def test_shares_keep_to_their_quota(sizes, more):
    """Largest remainder: where no part is below 1, each has its proportion rounded down or up."""
    total = sum(sizes)
    num_devices = len(sizes) + more
    quotas = [size * num_devices / total for size in sizes]
    if min(quotas) >= 1:
        shares = apportion(sizes, num_devices, "param_aware")
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))


def test_parts_that_fit_on_a_machine_are_on_one():
    assert place([2, 3, 1], 2, 3) == [(3, 4), (0, 1, 2), (5,)]
    assert place([6, 5, 5], 2, 8) == [(0, 1, 2, 3, 4, 5), (8, 9, 10, 11, 12), (6, 7, 13, 14, 15)]
    assert place([6, 2], 2, 4) == [(0, 1, 4, 5, 6, 7), (2, 3)]
    assert place([6, 3, 3], 3, 4) == [(0, 4, 8, 9, 10, 11), (1, 2, 3), (5, 6, 7)]


def test_load_spreads_parts_where_cohesion_allows_it():
    assert place([1, 1, 1, 1], 2, 2, load=True) == [(0,), (2,), (1,), (3,)]
    assert place([1, 1, 1, 1], 2, 2, load=False) == [(0,), (1,), (2,), (3,)]
    assert place([2, 2], 2, 2, cohesion=False, load=True) == [(0, 2), (1, 3)]
    assert place([1, 3], 2, 2, cohesion=False, load=False) == [(0,), (1, 2, 3)]


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_rank_has_one_part(nodes, size, data):
    cuts = sorted(
        data.draw(st.sets(st.integers(1, max(1, nodes * size - 1)), max_size=6)) - {nodes * size}
    )
    shares = [end - start for start, end in zip([0, *cuts], [*cuts, nodes * size], strict=True)]
    cohesion = data.draw(st.booleans())
    load = data.draw(st.booleans())
    found = place(shares, nodes, size, cohesion, load)
    assert sorted(rank for ranks in found for rank in ranks) == list(range(nodes * size))
    assert [len(ranks) for ranks in found] == shares
    assert found == place(list(shares), nodes, size, cohesion, load)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("70B", 70e9),
        ("500M", 500e6),
        ("0.5b", 5e8),
        ("1.5T", 1.5e12),
        ("12", 12),
        (600e9, 600e9),
        (7, 7),
        (0, 0),
    ],
)
def test_a_size_is_a_number_with_a_unit(written, size):
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written", ["", "B", "7 billion", "-1B", "1e9", -1, float("inf"), float("nan")]
)
def test_what_is_no_size_is_refused(written):
    with pytest.raises(UserError, match=rf"^'?{re.escape(str(written))}'? is not "):
        parse_size(written)
