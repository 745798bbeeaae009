"""The exchange: nothing lost or doubled whatever the sizes, even by tokens, and a bound that never wedges."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.bin_packing import partition
from distflow.scheduling.reshard_columns import Key, Metas, Readers, Reshard, ReshardError, SampleInfo, Select

STEP = Key("rollout to actor", 3, 2)


@dataclass(frozen=True)
class Row:
    group: int
    index: int
    prompt: int
    response: int

    @property
    def uid(self) -> str:
        return f"{self.group}-{self.index}"

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


def metas(rows: Sequence[Row], node: str = "") -> Metas:
    return Metas(
        np.array([row.prompt for row in rows], np.int32),
        np.array([row.response for row in rows], np.int32),
        np.array([row.group for row in rows], np.int64),
        tuple(row.uid for row in rows),
        node,
        {"index": np.array([row.index for row in rows], np.int64)},
    )


Object = tuple[Row, ...]  # what a reference stands for


def passed(
    parts: Sequence[Sequence[Row]], readers: Readers, nodes: Sequence[str] = (), select: Select | None = None
) -> list[list[Row]]:
    """What each rank reads of what the writers put."""
    exchange: Reshard[Object] = Reshard(limit_bytes=10**9)
    for writer, rows in enumerate(parts):
        assert exchange.reserve(STEP, writer, len(parts), len(rows))
        exchange.put(STEP, writer, metas(rows, nodes[writer] if nodes else ""), tuple(rows))
    ranks = []
    for rank in range(readers.num_ranks):
        share = exchange.take(STEP, rank, readers, select)
        assert [tuple(parts[writer]) for writer in share.writers] == list(share.refs)
        ranks.append([share.refs[part][row] for part, row in share.rows.tolist()])
    for rank in range(readers.num_ranks):
        exchange.release(STEP, rank)
    assert exchange.held_bytes == 0
    return ranks


def heaviest(ranks: Sequence[Sequence[Row]]) -> int:
    return max(sum(row.tokens for row in rows) for rows in ranks)


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    sizes = draw(st.lists(st.integers(1, 12), max_size=12))
    lengths = st.integers(0, 50)
    return [Row(group, i, draw(lengths), draw(lengths)) for group, size in enumerate(sizes) for i in range(size)]


@given(steps(), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_step_comes_through_any_chain_of_widths_whole_and_in_its_order(rows, widths, whole_groups, random):
    parts: list[list[Row]] = [[] for _ in range(random.randint(1, 4))]
    for _, group in itertools.groupby(rows, key=lambda row: row.group):
        random.choice(parts).extend(group)
    for width in [*widths, 1]:
        ranks = passed(parts, Readers(width, whole_groups))
        assert sorted(itertools.chain(*ranks), key=rows.index) == rows
        for rank in ranks:
            assert rank == sorted(rank, key=rows.index), "the order of groups"
        owners = {(row.group, rank) for rank, held in enumerate(ranks) for row in held}
        assert not whole_groups or len(owners) == len({group for group, _ in owners})
        parts = ranks
    assert parts == [rows]


def test_from_two_ranks_to_four_to_one():
    rows = [Row(group, i, 4 + group, 9 - i) for group in range(5) for i in range(3)]
    four = passed([rows[:9], rows[9:]], Readers(4, whole_groups=False))
    assert sorted(len(rank) for rank in four) == [3, 4, 4, 4]
    assert passed(four, Readers(1)) == [rows]


@given(steps(), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_who_came_first_changes_nothing_and_ranks_are_as_even_as_the_partition(rows, num_ranks, num_writers):
    parts = [rows[writer::num_writers] for writer in range(num_writers)]
    ranks = passed(parts, Readers(num_ranks, whole_groups=False))
    assert ranks == passed(parts[::-1], Readers(num_ranks, whole_groups=False))
    even = partition([row.tokens for row in rows], num_ranks)
    assert heaviest(ranks) == max(sum(rows[i].tokens for i in part) for part in even)


@given(steps(), st.integers(1, 4), st.booleans(), st.lists(st.sampled_from("ab"), min_size=4, max_size=4))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_locality_never_costs_balance(rows, num_ranks, whole_groups, where):
    parts = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    plain = passed(parts, Readers(num_ranks, whole_groups))
    local = passed(parts, Readers(num_ranks, whole_groups, tuple(where[:num_ranks])), nodes="ab")
    assert [sum(row.tokens for row in rank) for rank in local] == [sum(row.tokens for row in rank) for rank in plain]
    assert sorted(itertools.chain(*local), key=rows.index) == rows


def test_samples_of_equal_length_stay_on_their_node():
    parts = [[Row(group, i, 5, 5) for group in groups for i in range(2)] for groups in ((0, 3, 5), (1, 2, 4))]
    for nodes in (("a", "b"), ("b", "a")):
        ranks = passed(parts, Readers(2, nodes=nodes), nodes="ab")
        assert ranks == [sorted(parts["ab".index(node)], key=lambda row: row.uid) for node in nodes]


def test_a_selection_sees_metadata_and_is_divided_evenly():
    rows = [Row(group, i, 2, 3 + i) for group in range(4) for i in range(4)]

    def odd(info: SampleInfo) -> bool:
        assert info.sum_tokens == info.prompt_length + info.response_length and info.node_id == "a"
        assert info.uid.endswith(f"-{info.dict_info['index']}")
        return info.response_length % 2 == 1

    ranks = passed([rows[:7], rows[7:]], Readers(2), nodes="aa", select=odd)
    assert sorted(itertools.chain(*ranks), key=rows.index) == [row for row in rows if row.response % 2 == 1]
    assert [len(rank) for rank in ranks] == [4, 4]


def test_a_selection_by_length_or_by_machine_takes_in_the_order_of_tickets():
    rows = [Row(group, 0, tokens, 0) for group, tokens in enumerate((100, 600, 200, 700))]
    parts, nodes = [[rows[3], rows[0]], [rows[1], rows[2]]], "ab"
    assert passed(parts, Readers(1), nodes, lambda info: info.sum_tokens >= 512) == [[rows[1], rows[3]]]
    assert passed(parts, Readers(2), nodes, lambda info: info.sum_tokens >= 512) == [[rows[1]], [rows[3]]]
    assert passed(parts, Readers(1), nodes, lambda info: info.node_id == "a") == [[rows[0], rows[3]]]
    assert passed(parts, Readers(3), nodes, lambda info: False) == [[], [], []]


def test_a_selection_that_fails_leaves_the_step_as_it_was():
    exchange: Reshard[str] = Reshard(100)
    exchange.reserve(STEP, 0, 1, 1)
    exchange.put(STEP, 0, metas([Row(0, 0, 1, 1)]), "object")
    with pytest.raises(KeyError, match="scores"):
        exchange.take(STEP, 0, Readers(1), lambda info: info.dict_info["scores"] > 0)
    assert exchange.held_bytes == 1
    assert exchange.take(STEP, 0, Readers(1), lambda info: True).refs == ("object",)


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_samples_of_one_length_are_as_many_on_each_rank_as_can_be(num_samples, num_writers, num_ranks):
    rows = [Row(i, 0, 3, 4) for i in range(num_samples)]
    counts = [len(rank) for rank in passed([rows[w::num_writers] for w in range(num_writers)], Readers(num_ranks))]
    assert sum(counts) == num_samples and max(counts) - min(counts) <= 1


def test_a_step_that_was_read_is_forgotten_and_may_come_again():
    exchange: Reshard[str] = Reshard(100)
    for ref in ("first", "second"):
        assert not exchange.is_complete(STEP)
        assert exchange.reserve(STEP, 0, 1, 7)
        exchange.put(STEP, 0, metas([Row(0, 0, 1, 1)]), ref)
        for _ in range(2):
            assert exchange.take(STEP, 0, Readers(1)).refs == (ref,), "the same until it is released"
        exchange.release(STEP, 0)
        assert exchange.held_bytes == 0


def test_a_rank_without_samples_is_told_where_their_columns_are():
    exchange: Reshard[str] = Reshard(100)
    for writer in range(2):
        exchange.reserve(STEP, writer, 2, 1)
        exchange.put(STEP, writer, metas([Row(0, 0, 1, 1)] if writer else []), f"object {writer}")
    shares = [exchange.take(STEP, rank, Readers(2)) for rank in range(2)]
    assert [share.refs for share in shares] == [("object 1",), ("object 0",)]
    assert shares[1].rows.shape == (0, 2)


def test_a_step_is_complete_once_each_of_its_writers_has_put():
    exchange: Reshard[str] = Reshard(100)
    assert not exchange.is_complete(STEP)
    for writer in (2, 0):
        exchange.reserve(STEP, writer, 3, 1)
        exchange.put(STEP, writer, metas([]), "")
    exchange.reserve(STEP, 1, 3, 1)
    assert not exchange.is_complete(STEP)
    exchange.put(STEP, 1, metas([]), "")
    assert exchange.is_complete(STEP)


def test_edges_steps_and_versions_are_kept_apart():
    exchange: Reshard[str] = Reshard(100)
    keys = [Key(queue, step, version) for queue in "ab" for step in (1, 2) for version in (0, 1)]
    for key in keys:
        assert exchange.reserve(key, 0, 1, 1)
        exchange.put(key, 0, metas([Row(0, 0, 1, 1)]), str(key))
    assert [exchange.take(key, 0, Readers(1)).refs for key in keys] == [(str(key),) for key in keys]
    exchange.release(keys[3], 0)
    assert exchange.held_bytes == len(keys) - 1
    assert not exchange.is_complete(keys[3]) and exchange.is_complete(keys[2])


def test_a_full_exchange_admits_the_oldest_step_of_each_edge_alone():
    exchange: Reshard[str] = Reshard(limit_bytes=10)
    first, second, other = Key("a", 0, 0), Key("a", 1, 0), Key("b", 0, 0)
    assert exchange.reserve(first, 0, 2, 8)
    assert not exchange.reserve(second, 0, 2, 3) and exchange.reserve(second, 1, 2, 2)
    assert exchange.reserve(first, 1, 2, 8), "it could never be read without"
    assert exchange.reserve(other, 0, 1, 50), "its readers may be those that release the first"
    for writer in range(2):
        exchange.put(first, writer, metas([]), "")
    exchange.take(first, 0, Readers(2))
    exchange.take(first, 1, Readers(2))
    exchange.release(first, 1)
    assert exchange.held_bytes == 68 and not exchange.reserve(second, 0, 2, 3)
    exchange.release(first, 0)
    assert exchange.held_bytes == 52 and exchange.reserve(second, 0, 2, 3), "it is the oldest now"


def test_writers_and_readers_who_disagree_are_named():
    exchange: Reshard[str] = Reshard(100)
    exchange.reserve(STEP, 0, 1, 1)
    with pytest.raises(ReshardError, match=r"writer 0 puts step 3 of queue 'rollout to actor' \(version 2\) twice"):
        exchange.reserve(STEP, 0, 1, 1)
    with pytest.raises(ReshardError, match="has 1 writers, but 1 of 2 writes to it"):
        exchange.reserve(STEP, 1, 2, 1)
    exchange.put(STEP, 0, metas([]), "")
    exchange.take(STEP, 0, Readers(2))
    with pytest.raises(ReshardError, match=r"is read by Readers\(num_ranks=2.*but rank 1 says Readers\(num_ranks=3"):
        exchange.take(STEP, 1, Readers(3))


def test_samples_of_no_group_are_divided_one_by_one():
    exchange: Reshard[str] = Reshard(100)
    lengths = np.full(4, 3, np.int32)
    for writer in range(2):
        exchange.reserve(STEP, writer, 2, 1)
        exchange.put(STEP, writer, Metas(lengths, lengths, np.full(4, -1), ("",) * 4), "")
    assert [len(exchange.take(STEP, rank, Readers(4)).rows) for rank in range(4)] == [2, 2, 2, 2]


@given(steps(), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_ranks_that_share_a_step_already_pick_their_own_rows_in_their_own_order(rows, widths, random):
    """Through any chain of widths, whoever shares the step how; tensor-parallel writers put the same twice."""
    parts: list[list[Row]] = [rows, rows]
    for width in widths:
        exchange: Reshard[Object] = Reshard(limit_bytes=0)
        for writer, part in enumerate(parts):
            assert exchange.reserve(STEP, writer, len(parts), len(part))
            exchange.put(STEP, writer, metas(part), tuple(part))
        wanted: list[list[Row]] = [[] for _ in range(width)]
        for row in random.sample(rows, len(rows)):
            random.choice(wanted).append(row)
        for rank, mine in enumerate(wanted):
            share = exchange.pick(STEP, width, [row.uid for row in mine])
            assert [share.refs[part][row] for part, row in share.rows.tolist()] == mine
            assert share.refs, "one object is named for its columns"
            exchange.release(STEP, rank)
        assert exchange.held_bytes == 0
        parts = wanted


def test_a_sample_that_nobody_put_is_named():
    exchange: Reshard[Object] = Reshard(limit_bytes=0)
    exchange.reserve(STEP, 0, 1, 0)
    exchange.put(STEP, 0, metas([Row(0, 0, 1, 1)]), ())
    with pytest.raises(ReshardError, match=r"step 3 of queue 'rollout to actor' \(version 2\) has no sample '7-0'"):
        exchange.pick(STEP, 2, ["0-0", "7-0"])
    with pytest.raises(ReshardError, match="one of its readers says they are 3"):
        exchange.pick(STEP, 3, ["0-0"])
