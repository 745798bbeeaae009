"""Scores that are large, or no numbers of ours, on the whole way from a reward function to the
advantages."""

import math
from pathlib import Path

import numpy as np
import pytest

from distflow.data.batch import Batch
from tests.e2e.runs import Playground, Run

ONE_STEP = ("trainer.total_training_steps=1", "trainer.save_groups=all")
BY_SCORE = "algorithm.filter_groups.metric=score"
NORM = (
    "algorithm.adv_estimator=reinforce",
    "algorithm.adv_norm={mean_level: group, std_level: group}",
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    k = sum(map(ord, solution_str)) % 7
    return SCORE
"""


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    return Playground(tmp_path)


def run(ground: Playground, score: str, preset: str = "grpo", *keys: str) -> Run:
    ground.write_reward(REWARD.replace("SCORE", score))
    return ground.run(preset, *ONE_STEP, *keys)


def recorded(run: Run) -> Batch:
    return Batch.load(run.folder / "tokens" / "000001.safetensors")


def wanted(batch: Batch, exact: list[float], unit: float) -> dict[int, list[float]]:
    """GRPO's advantages by group, in float64, of scores `unit · k` without what all of them
    share."""
    groups = batch["group_index"].tolist()
    valid = batch["valid"].tolist()
    found: dict[int, list[float]] = {}
    for group in set(groups):
        own = np.array(
            [exact[i] if valid[i] else np.nan for i in range(len(exact)) if groups[i] == group]
        )
        spread = np.nanstd(own, ddof=1) + 1e-6 / unit
        found[group] = np.nan_to_num((own - np.nanmean(own)) / spread).tolist()
    return found


def advantages(batch: Batch) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for group, row in zip(batch["group_index"].tolist(), batch["advantages"].tolist(), strict=True):
        found.setdefault(group, []).append(row[0])
    return found


def k_of(batch: Batch) -> list[int]:
    return [sum(map(ord, text)) % 7 for text in batch["responses"]]


@pytest.mark.parametrize(
    ("preset", "score", "unit", "keys"),
    [
        ("grpo", "1e6 + 0.01 * k", 0.01, ()),
        ("grpo", "2**24 + k", 1.0, ()),
        ("grpo", "-1e9 - 0.001 * k", -0.001, ()),
        ("dapo", "1e6 + 0.01 * k", 0.01, (BY_SCORE,)),
        (
            "dapo",
            "1e6 + 0.01 * k",
            0.01,
            (BY_SCORE, "reward.overlong.buffer_tokens=4", "reward.overlong.factor=1e7"),
        ),
        ("grpo", "1e6 + 0.01 * k", 0.01, NORM),
    ],
)
def test_what_is_learned_is_the_difference(
    ground: Playground, preset: str, score: str, unit: float, keys: tuple[str, ...]
) -> None:
    done = run(ground, score, preset, *keys)
    batch = recorded(done)
    lengths = batch.lengths("response").tolist()
    if len(set(lengths)) == 1 or "overlong" not in "".join(keys):
        exact = wanted(batch, [float(k) for k in k_of(batch)], abs(unit))
        found = advantages(batch)
        for group, own in exact.items():
            # its deviation is that of tokens
            size = max(found[group]) / max(own) if keys == NORM else 1.0
            sign = math.copysign(size, unit)
            assert found[group] == pytest.approx([sign * each for each in own], rel=1e-4, abs=1e-4)
    assert done.metrics()[0]["actor/grad_norm"] > 0 and done.notes("finding") == []


@pytest.mark.parametrize(
    "odd", ["1e39", "-1e39", "float('inf')", "float('nan')", "10**400", "{'score': 1, 'acc': 1e39}"]
)
def test_a_number_beyond_float32_is_the_error_of_its_own_sample(
    ground: Playground, odd: str
) -> None:
    done = run(ground, f"{odd} if k == 3 else k / 6")
    batch = recorded(done)
    assert batch["valid"].tolist() == [k != 3 for k in k_of(batch)] and not batch["valid"].all()
    assert all("custom: it returned" in error for error in batch["reward_errors"] if error)
    exact = wanted(batch, [k / 6 for k in k_of(batch)], 1.0)
    found = advantages(batch)
    for group, own in exact.items():
        assert found[group] == pytest.approx(own, abs=1e-4)
    assert done.metrics()[0]["actor/skipped"] == 0
