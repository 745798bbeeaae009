"""Normalised rewards and advantages, and running moments, against the reference."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algorithms.normalization import Moments, Normalization
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import Ranks, run_on_ranks
from tests.references import numbers
from tests.references.normalization import Value, normalise, running_std

LEVELS = st.sampled_from((None, "batch", "group", "running"))
BEFORE = [2.0, 4.0, 9.0]
"""Rewards of earlier steps."""


def values_of(batch: Drawn, name: str, group_size: int | None) -> list[Value]:
    groups = {}
    for row in batch.rows():
        run = row // group_size if group_size else 0
        groups[row] = (int(batch.group[row]), run)

    sizes = Counter(groups.values())
    found = []
    for row, group in groups.items():
        for number in batch.of_tokens(row, name).tolist():
            found.append(Value(number, group, sizes[group]))

    return found


@settings(max_examples=150)
@given(
    batch=batches(),
    levels=st.tuples(LEVELS, LEVELS),
    leave_one_out=st.booleans(),
    is_unbiased=st.booleans(),
    eps=st.sampled_from((1e-5, 0.1)),
    group_size=st.sampled_from((None, 2)),
    first=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_over_two_ranks(
    batch: Drawn,
    levels: tuple[Any, Any],
    leave_one_out: bool,
    is_unbiased: bool,
    eps: float,
    group_size: int | None,
    first: list[bool],
) -> None:
    norm = Normalization(levels[0], leave_one_out, levels[1], is_unbiased, eps, group_size)
    values = values_of(batch, "rewards", group_size)
    so_far = BEFORE + [value.number for value in values]
    wanted = iter(normalise(values, so_far, levels[0], leave_one_out, levels[1], is_unbiased, eps))
    shares = parts_of(batch, first)
    counted = batch.mask * batch.valid[:, None]
    episodes = torch.arange(len(batch))

    def of_rank(rows: list[int]) -> Any:
        def call(ranks: Ranks) -> Any:
            column = batch["rewards"][rows].float()
            before = torch.tensor([BEFORE], dtype=torch.float64)
            moments = Moments().with_values(before, torch.ones_like(before))
            moments = moments.with_values(column, counted[rows], ranks)
            found = norm(
                column,
                batch.mask[rows],
                batch.group[rows],
                batch.valid[rows],
                episodes[rows],
                ranks,
                moments,
            )

            return found, moments

        return call

    expected = torch.zeros_like(batch.mask)
    for row in batch.rows():
        for token in (batch.mask[row] > 0).nonzero()[:, 0].tolist():
            expected[row, token] = next(wanted)

    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        torch.testing.assert_close(found[0], expected[rows], rtol=1e-8, atol=1e-9)
        assert found[1].count == len(so_far)
        assert found[1].mean == pytest.approx(numbers.mean(so_far), rel=1e-12)
        for unbiased in (True, False):
            wanted_std = running_std(so_far, unbiased)
            assert found[1].std(unbiased) == pytest.approx(wanted_std, rel=1e-9)


def test_moments_of_large_values_keep_their_digits() -> None:
    values = torch.tensor([[1e8, 1e8 + 1.0, 1e8 + 5.0]], dtype=torch.float64)
    moments = Moments().with_values(values, torch.ones(1, 3))
    assert moments.std() == pytest.approx(running_std([0.0, 1.0, 5.0], True), rel=1e-9)


def test_too_few_values_have_no_deviation() -> None:
    one = Moments().with_values(torch.tensor([[4.0]]), torch.ones(1, 1))
    assert (Moments().std(), one.mean, one.std(), one.std(unbiased=False)) == (1.0, 4.0, 1.0, 0.0)
    assert Moments(3.0, 0.5, 2.0).with_values(torch.ones(1, 1), torch.zeros(1, 1)) == Moments(
        3.0, 0.5, 2.0
    )


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -123.456])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("level", ["batch", "group"])
def test_equal_rewards_give_exactly_nothing(level: Any, leave_one_out: bool, reward: float) -> None:
    rewards = torch.full((7, 1), reward)
    norm = Normalization(level, leave_one_out, level, eps=1e-12)
    assert norm(rewards, torch.ones(7, 1), torch.zeros(7)).tolist() == [[0.0]] * 7


def test_runs_need_the_place_of_an_episode() -> None:
    with pytest.raises(ValueError, match="episode_index"):
        Normalization("group", group_size=2)(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2))
