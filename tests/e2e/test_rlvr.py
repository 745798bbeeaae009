"""Two domains trained together, each with its verifiers and its estimator: what the loss is given,
worked out again."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from tests.e2e.runs import Playground, Run

REWARDS = """
def sums(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 5 / 4


def words(data_source, solution_str, ground_truth, extra_info=None):
    if sum(map(ord, solution_str)) % 6 == 0:
        raise ConnectionError("503")
    return len(set(solution_str)) / 10
"""
DOMAINS = (
    "algorithm.domains={sums: {adv_estimator: grpo, use_kl_in_reward: true, kl_ctrl: {kl_coef: "
    "0.2}, "
    "reward_norm: {mean_level: null, std_level: null}, reward_clip: null}, words: {adv_estimator: "
    "gae, lam: 0.9, "
    "reward_scale: 3, reward_norm: {mean_level: running, std_level: running}}}"
)


def playground(folder: Path) -> Playground:
    made = Playground(folder)
    rows = [
        {
            "prompt": f"{'ab' * (i % 3 + 1)}{i}=",
            "answer": "7",
            "data_source": ("sums", "words")[i % 2],
        }
        for i in range(12)
    ]
    made.write_rows(rows)
    (folder / "rewards.py").write_text(REWARDS)

    return made


def settings(folder: Path, *more: str) -> list[str]:
    file = folder / "rewards.py"
    return [
        (
            f"reward.functions={{sums: ['{file}:sums', {{name: format, weight: 0.5}}], words: "
            f"['{file}:words']}}"
        ),
        "reward.domains={words: {timeout_s: 5, retries: 1, backoff_s: 0.001}}",
        "reward.max_error_rate=1",
        DOMAINS,
        "trainer.save_groups=all",
        "data.shuffle=false",
        "actor_rollout_ref.actor.optim.lr=0.02",
        *more,
    ]


def batch_of(run: Run, step: int) -> Batch:
    return Batch.load(run.folder / "tokens" / f"{step:06d}.safetensors")


@pytest.mark.slow
def test_every_domain_is_judged_processed_and_estimated_by_its_own_settings(tmp_path):
    run = playground(tmp_path).run("rlvr", *settings(tmp_path, "trainer.total_training_steps=3"))
    seen: list[float] = []
    for step in (1, 2, 3):
        batch = batch_of(run, step)
        assert batch["domain"] == ["sums"] * 4 + ["words"] * 4 + ["sums"] * 4 + ["words"] * 4, (
            "in the order of groups"
        )
        seen += check_words(batch, seen)
        check_sums(batch)
        failed = [error is not None for error in batch["reward_errors"]]
        assert batch["valid"].tolist() == [not each for each in failed]
        assert float(batch["loss_mask"][torch.tensor(failed)].sum()) == 0

    metrics = run.metrics()
    assert sum(each["reward/errors"] for each in metrics) > 0 and all(
        "critic/vf_loss" in each for each in metrics
    )
    assert all(
        each["reward/retries"] == each["reward/errors"] for each in metrics if each["reward/errors"]
    )
    assert metrics[-1]["reward_norm/running_mean/words"] == pytest.approx(statistics.fmean(seen))
    assert metrics[-1]["actor/kl_coef/sums"] == 0.2
    file = tmp_path / "rewards.py"
    assert {
        f"reward/sums/{file}:sums",
        "reward/sums/format",
        f"reward/words/{file}:words",
    } <= metrics[-1].keys()


def check_words(batch: Batch, seen: list[float]) -> list[float]:
    """GAE of rewards by the moments of all rewards so far, whitened over this domain alone; its
    scores."""
    rows = [i for i, name in enumerate(batch["domain"]) if name == "words" and batch["valid"][i]]
    scores = [3 * float(batch["scores"][i]) for i in rows]
    so_far = [*seen, *scores]
    mean = statistics.fmean(so_far)
    scale = statistics.stdev(so_far) + 1e-5

    raw: dict[int, list[float]] = {}
    for i, score in zip(rows, scores, strict=True):
        length = int(batch.lengths("response")[i])
        values = batch["values"][i, :length].tolist()

        running = 0.0
        out = [0.0] * length
        for t in reversed(range(length)):
            reward = max(min((score - mean) / scale, 5.0), -5.0) if t == length - 1 else 0.0
            running = (
                reward + (values[t + 1] if t + 1 < length else 0.0) - values[t] + 0.9 * running
            )
            out[t] = running

        raw[i] = out
        returns = [a + v for a, v in zip(out, values, strict=True)]
        assert batch["returns"][i, :length].tolist() == pytest.approx(returns, abs=1e-4)

    tokens = [value for out in raw.values() for value in out]
    centre = statistics.fmean(tokens)
    spread = statistics.stdev(tokens)

    for i, out in raw.items():
        found = batch["advantages"][i, : len(out)].tolist()
        assert found == pytest.approx([(value - centre) / spread for value in out], abs=1e-3)

    return scores


def check_sums(batch: Batch) -> None:
    """GRPO of the weighted sum of both parts less the KL."""
    groups: dict[int, dict[int, float]] = {}
    for i, name in enumerate(batch["domain"]):
        if name == "sums":
            parts: dict[str, Any] = batch["reward_parts"][i]
            length = int(batch.lengths("response")[i])
            kl = float(
                (batch["old_log_probs"][i, :length] - batch["ref_log_prob"][i, :length])
                .double()
                .sum()
            )
            score = sum(value * (0.5 if part == "format" else 1.0) for part, value in parts.items())
            groups.setdefault(int(batch["group_index"][i]), {})[i] = score - 0.2 * kl

    for rewards in groups.values():
        mean = statistics.fmean(rewards.values())
        spread = statistics.stdev(rewards.values())

        for i, reward in rewards.items():
            wanted = (reward - mean) / (spread + 1e-6) if spread > 1e-4 else 0.0
            length = int(batch.lengths("response")[i])
            assert batch["advantages"][i, :length].tolist() == pytest.approx(
                [wanted] * length, abs=5e-3
            )


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_moments_of_each_domain(tmp_path):
    made = playground(tmp_path)
    keys = settings(
        tmp_path, "trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.keep_last=5"
    )
    whole = made.run("rlvr", *keys)
    wanted = batch_of(whole, 3)["advantages"]
    last = whole.metrics()[-1]
    resumed = made.run("rlvr", *keys, f"trainer.resume_mode={whole.folder}/checkpoints/step-000002")
    assert resumed.outcome.steps == 3 and len(resumed.metrics()) == 3
    name = "reward_norm/running_std/words"
    assert resumed.metrics()[-1][name] == pytest.approx(last[name], rel=1e-12)
    torch.testing.assert_close(batch_of(resumed, 3)["advantages"], wanted)
