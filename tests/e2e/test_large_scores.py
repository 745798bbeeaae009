"""Scores that are large, or no numbers of ours, on the whole way from a reward function to the
advantages."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distflow.api.load_run import load_run
from distflow.cluster.local_processes_launcher import launch_processes
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.observe.run_reader import read_samples
from distflow.runtime.spec import LaunchOptions
from distflow.scheduling.sample_queue import Exhausted
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


def test_a_sum_beyond_float32_is_an_error_too(ground: Playground) -> None:
    weighted = "reward.functions={default: [{name: custom, weight: 1e20}]}"
    batch = recorded(run(ground, "1e20 if k == 3 else k / 6", "grpo", weighted))
    assert batch["valid"].tolist() == [k != 3 for k in k_of(batch)]
    assert any("1e+40" in error for error in batch["reward_errors"] if error)


@pytest.mark.parametrize(
    ("score", "keys", "says"),
    [
        ("10**17 + k", (), "float64"),
        ("1e12 + 0.001 * k", (), "float64"),
        ("1e6 + 0.01 * k", ("algorithm.adv_estimator=reinforce",), "float32"),
        ("1e30 * k", ("algorithm.adv_estimator=rloo",), "float32"),
    ],
)
def test_differences_that_a_type_does_not_hold_are_said(
    ground: Playground, score: str, keys: tuple[str, ...], says: str
) -> None:
    ground.write_reward(REWARD.replace("SCORE", score))
    done = ground.run("grpo", "trainer.total_training_steps=2", "trust.check_freq=1", *keys)
    assert any(says in note and "differences-lost" in note for note in done.notes("finding"))
    assert not any("nothing computes" in note for note in done.notes("info"))


def test_scores_that_float64_merges_are_no_equal_ones(ground: Playground) -> None:
    with pytest.raises(Exhausted, match="8 too_large.*float64"):
        run(ground, "10**17 + k", "dapo", BY_SCORE, "algorithm.filter_groups.max_num_gen_batches=2")


def test_the_run_finds_scores_that_were_rounded(
    ground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Batch._placed_scores
    monkeypatch.setattr(Batch, "_placed_scores", lambda batch: placed(batch).float().double())
    with pytest.raises(TrustError, match="rewards|advantages"):
        run(ground, "1e6 + 0.01 * k")


EXTRAS = """
import numpy as np, torch
class Odd: pass
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    k = sum(map(ord, solution_str)) % 7
    return {
        "score": np.float32(k / 6), "acc": np.bool_(k == 3), "n": np.int64(7), "flag": np.bool_(True),
        "half": np.float32(0.5), "list": np.array([1, 2]), "rows": np.ones((2, 2)), "tensor": torch.tensor(3),
        "low": torch.tensor([1.5], dtype=torch.bfloat16), "none": None, "inside": {"x": [np.int8(1), torch.ones(1)]},
        "odd": Odd(), "complex": 1j,
    }
"""  # noqa: E501
STORED: dict[str, Any] = {
    **{
        "n": 7,
        "flag": True,
        "half": 0.5,
        "list": [1, 2],
        "rows": [[1.0, 1.0], [1.0, 1.0]],
        "tensor": 3,
        "low": [1.5],
    },
    **{"none": None, "inside": {"x": [1, [1.0]]}},
}


def test_values_beside_a_score_stay_what_they_are(ground: Playground) -> None:
    ground.write_reward(EXTRAS)
    validates = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        "trainer.test_freq=1",
    )
    done = ground.run("grpo", "trainer.total_training_steps=2", *validates)
    samples = read_samples(done.folder, 2)
    assert samples
    for sample in samples:
        extra = sample["extra"]
        assert isinstance(extra, dict)
        found = {name: extra[f"custom/{name}"] for name in STORED}
        assert found == STORED and json.dumps(found) == json.dumps(STORED)
    for key in ("custom/odd", "custom/complex"):
        assert len([note for note in done.notes("warning") if key in note]) == 1
    assert not any("custom/n" in note for note in done.notes("warning"))


@pytest.mark.slow
def test_sql_reads_them_as_numbers(ground: Playground) -> None:
    ground.write_reward(EXTRAS)
    done = ground.run("grpo", "trainer.total_training_steps=1")
    query = (
        "select sum((extra->'custom/n')::int) as n, any_value(json_type(extra->'custom/list')) as "
        "l from samples"
    )
    (row,) = load_run(done.folder).sql(query)
    assert row == {"n": 7 * 16, "l": "ARRAY"}


def test_equal_sums_of_parts_are_equal_scores(ground: Playground) -> None:
    """0.1 + 0.2 is 0.3, as the weights are written."""
    ground.write_reward(REWARD.replace("SCORE", "0.1 if k % 2 else 0.3"))
    second = (
        "def twice(solution_str, ground_truth):\n"
        "    return 0.2 if sum(map(ord, solution_str)) % 7 % 2 else 0.0\n"
    )
    (ground.folder / "twice.py").write_text(second)
    functions = f"reward.functions={{default: [custom, '{ground.folder}/twice.py:twice']}}"
    batch = recorded(ground.run("grpo", *ONE_STEP, functions))
    assert len({*map(str, batch["reward_parts"])}) > 1 and not torch.any(batch["advantages"])


@pytest.mark.slow
def test_two_processes_learn_what_one_does(ground: Playground) -> None:
    """Whitened over the step's samples of all ranks; a value that cannot be stored is named once in
    all."""
    ground.write_reward(REWARD.replace("SCORE", "{'score': 1e6 + 0.01 * k, 'odd': 1j}"))
    keys = (
        "trainer.total_training_steps=1",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
    )
    config, spec = ground.spec("grpo", *keys, "trainer.n_gpus_per_node=2", name="two")
    two = Run(ground.folder / "two", config, launch_processes(spec, LaunchOptions()))
    found: list[dict[str, Any]] = [
        {str(sample["uid"]): sample["advantage"] for sample in read_samples(done.folder, 1)}
        for done in (ground.run("grpo", *keys, name="one"), two)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-9) and max(found[0].values()) > 1
    assert len([note for note in two.notes("warning") if "custom/odd" in note]) == 1
