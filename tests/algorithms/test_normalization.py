"""AReaL's normalisation of rewards and advantages, against loops in plain Python that follow its
formula."""

import math
from typing import Any

import pytest
import torch

from distflow.algorithms.normalization_filters_and_weights import Normalization

Cells = dict[tuple[int, int], float]


def normalised(case: Any, name: str, norm: Normalization, groups: list[int]) -> Cells:
    """(row, token) → value, over the cells that count."""
    cells = {
        (i, t): float(case[name][i, t])
        for i, keep in enumerate(case.counted.tolist())
        for t, m in enumerate(keep)
        if m
    }
    valid = case.valid.tolist()

    def pool(cell: tuple[int, int], level: str) -> list[tuple[int, int]]:
        return [other for other in cells if level == "batch" or groups[other[0]] == groups[cell[0]]]

    def is_one_sample(cell: tuple[int, int]) -> bool:
        return sum(ok and groups[i] == groups[cell[0]] for i, ok in enumerate(valid)) == 1

    def mean(cell: tuple[int, int]) -> float:
        if norm.mean_level is None:
            return 0.0
        others = [cells[other] for other in pool(cell, norm.mean_level)]
        if not norm.mean_leave1out:
            return sum(others) / len(others)
        if norm.mean_level == "group" and is_one_sample(cell):
            return cells[cell]
        return (sum(others) - cells[cell]) / (len(others) - 1) if len(others) > 1 else 0.0

    centred = {cell: value - mean(cell) for cell, value in cells.items()}

    def scale(cell: tuple[int, int]) -> float:
        if norm.std_level is None:
            return 1.0
        squares = [centred[other] ** 2 for other in pool(cell, norm.std_level)]
        if norm.std_unbiased:
            if len(squares) <= 1 or (norm.std_level == "group" and is_one_sample(cell)):
                return 1.0 + norm.eps
            return math.sqrt(sum(squares) / (len(squares) - 1)) + norm.eps
        return math.sqrt(sum(squares) / len(squares)) + norm.eps

    return {cell: value / scale(cell) for cell, value in centred.items()}


def assert_equal(found: torch.Tensor, wanted: Cells) -> None:
    for i, row in enumerate(found.tolist()):
        for t, value in enumerate(row):
            assert value == pytest.approx(wanted.get((i, t), 0.0), rel=1e-10, abs=1e-12), (i, t)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("leave1out", [True, False])
@pytest.mark.parametrize("std_level", ["batch", "group", None])
@pytest.mark.parametrize("mean_level", ["batch", "group", None])
def test_of_tokens(
    case: Any, seed: int, mean_level: Any, std_level: Any, leave1out: bool, unbiased: bool
) -> None:
    batch = case(seed)
    norm = Normalization(mean_level, leave1out, std_level, unbiased, eps=1e-3)
    found = norm(batch["advantages"], batch.mask, batch.group, batch.valid)
    assert_equal(found, normalised(batch, "advantages", norm, batch.group.tolist()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("leave1out", [True, False])
@pytest.mark.parametrize(
    ("mean_level", "std_level"), [("group", "group"), ("group", "batch"), ("batch", "group")]
)
def test_of_one_reward_a_sample(
    case: Any, seed: int, mean_level: Any, std_level: Any, leave1out: bool
) -> None:
    batch = case(seed, bs=13)
    batch.mask = torch.ones(13, 1)
    batch.columns = {
        "rewards": torch.randn(
            13, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
    }
    norm = Normalization(mean_level, leave1out, std_level)
    found = norm(batch["rewards"], batch.mask, batch.group, batch.valid)
    assert_equal(found, normalised(batch, "rewards", norm, batch.group.tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_cut_by_their_episodes(case: Any, seed: int) -> None:
    """Twelve samples of three prompts, in runs of two."""
    batch = case(seed, bs=12)
    batch.group = torch.arange(12) // 4
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    batch.group = batch.group[order]
    episodes = (torch.arange(12) % 4)[order]
    norm = Normalization("group", False, "group", group_size=2)
    found = norm(batch["values"], batch.mask, batch.group, batch.valid, episodes)
    runs = [int(g) * 10 + int(e) // 2 for g, e in zip(batch.group, episodes, strict=True)]
    assert_equal(found, normalised(batch, "values", norm, runs))
    with pytest.raises(ValueError, match="episode_index"):
        norm(batch["values"], batch.mask, batch.group)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -123.456])
@pytest.mark.parametrize("leave1out", [True, False])
@pytest.mark.parametrize("level", ["batch", "group"])
def test_equal_rewards_give_exactly_nothing(level: Any, leave1out: bool, reward: float) -> None:
    rewards = torch.full((7, 1), reward)
    norm = Normalization(level, leave1out, level, eps=1e-12)
    assert norm(rewards, torch.ones(7, 1), torch.zeros(7)).tolist() == [[0.0]] * 7


def test_by_hand() -> None:
    """Rewards 1, 0, 0, 1 of a group: ±.5 over √(1/3) + 1e-5; leave-one-out 1 − 1/3 = 2/3."""
    rewards = torch.tensor([[1.0], [0], [0], [1]])
    ones = torch.ones(4, 1)
    group = torch.zeros(4)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-5)
    found = Normalization("group", std_level="group")(rewards, ones, group)
    assert found.flatten().tolist() == pytest.approx([a, -a, -a, a], rel=1e-12)
    found = Normalization("group", mean_leave1out=True)(rewards, ones, group)
    assert found.flatten().tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    # Without a mean it is the root of the mean square: √(2/3).
    found = Normalization(std_level="batch")(rewards, ones, group)
    assert found.flatten().tolist() == pytest.approx(
        [1 / (math.sqrt(2 / 3) + 1e-5), 0, 0, 1 / (math.sqrt(2 / 3) + 1e-5)]
    )


@pytest.mark.parametrize(("bs", "length"), [(0, 0), (0, 3), (2, 0)])
@pytest.mark.parametrize("level", ["batch", "group"])
def test_a_batch_without_rows_or_tokens(level: Any, bs: int, length: int) -> None:
    found = Normalization(level, std_level=level)(
        torch.zeros(bs, length), torch.ones(bs, length), torch.zeros(bs, dtype=torch.int64)
    )
    assert found.shape == (bs, length)
