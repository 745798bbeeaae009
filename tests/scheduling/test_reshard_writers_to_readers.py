"""The exchange: nothing lost or doubled whatever the sizes."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.reshard_writers_to_readers import Key, Reshard, ReshardError

STEP = Key("rollout to actor", 3, 2)
Object = tuple[str, ...]  # what a reference stands for: its uids


def exchange_with(parts: Sequence[Sequence[str]], key: Key = STEP) -> Reshard[Object]:
    """A step that each of the writers has put its part of."""
    exchange: Reshard[Object] = Reshard()
    for writer, uids in enumerate(parts):
        exchange.put(key, writer, len(parts), uids, tuple(uids))
    return exchange


@given(
    st.lists(st.uuids().map(str), max_size=30, unique=True),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_rank_picks_its_own_rows_in_its_own_order(uids, widths, random):
    """Through any chain of widths, whoever shares the step how; tensor-parallel writers put the
    same twice."""
    parts: list[list[str]] = [uids, uids]
    for width in widths:
        exchange = exchange_with(parts)
        wanted: list[list[str]] = [[] for _ in range(width)]
        for uid in random.sample(uids, len(uids)):
            random.choice(wanted).append(uid)

        for rank, mine in enumerate(wanted):
            share = exchange.pick(STEP, width, mine)
            assert [share.refs[part][row] for part, row in share.rows.tolist()] == mine
            assert [tuple(parts[writer]) for writer in share.writers] == list(share.refs)
            exchange.release(STEP, rank)

        assert not exchange.is_complete(STEP)
        parts = wanted


def test_a_rank_fetches_only_objects_that_hold_samples_of_its_own():
    exchange = exchange_with([["a", "b"], ["c"], []])
    assert exchange.pick(STEP, 3, ["c"]).refs == (("c",),)
    nothing = exchange.pick(STEP, 3, [])
    assert len(nothing.refs) == 1 and nothing.rows.shape == (0, 2), (
        "one object is named for its columns"
    )


def test_a_sample_that_nobody_put_is_named():
    exchange = exchange_with([["0-0"]])
    with pytest.raises(ReshardError, match=r"step 3 .*'rollout to actor' \(version 2\) .*'7-0'"):
        exchange.pick(STEP, 2, ["0-0", "7-0"])

    with pytest.raises(ReshardError, match="has 2 readers.* 3$"):
        exchange.pick(STEP, 3, ["0-0"])


def test_a_step_that_was_read_is_forgotten_and_may_come_again():
    exchange: Reshard[str] = Reshard()
    for ref in ("first", "second"):
        assert not exchange.is_complete(STEP)
        exchange.put(STEP, 0, 1, ("a",), ref)
        for _ in range(2):
            assert exchange.pick(STEP, 1, ["a"]).refs == (ref,), "the same until it is released"
        exchange.release(STEP, 0)


def test_a_step_is_complete_once_each_of_its_writers_has_put():
    exchange: Reshard[str] = Reshard()
    assert not exchange.is_complete(STEP)
    for writer in (2, 0):
        exchange.put(STEP, writer, 3, (), "")
    assert not exchange.is_complete(STEP)
    exchange.put(STEP, 1, 3, (), "")
    assert exchange.is_complete(STEP)


def test_edges_steps_and_versions_are_kept_apart():
    exchange: Reshard[str] = Reshard()
    keys = [Key(queue, step, version) for queue in "ab" for step in (1, 2) for version in (0, 1)]
    for key in keys:
        exchange.put(key, 0, 1, ("a",), str(key))
    assert [exchange.pick(key, 1, ["a"]).refs for key in keys] == [(str(key),) for key in keys]
    exchange.release(keys[3], 0)
    assert not exchange.is_complete(keys[3]) and exchange.is_complete(keys[2])


def test_writers_who_disagree_are_named():
    exchange: Reshard[str] = Reshard()
    exchange.put(STEP, 0, 2, (), "")
    for writer, num_writers in ((0, 2), (1, 3)):
        with pytest.raises(ReshardError, match=f"writer {writer} of {num_writers} .*step 3"):
            exchange.put(STEP, writer, num_writers, (), "")
