"""What a run hands to its losses where several steps make the advantages, worked out again from its
columns."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from distflow.data.batch import Batch
from tests.e2e.runs import Playground

ONE_STEP = ["trainer.total_training_steps=1", "trainer.save_groups=all"]
LENGTH = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 5
"""


def standard(values: Tensor) -> Tensor:
    """Less the mean, over the unbiased standard deviation; 0 where all are equal."""
    return (
        (values - values.mean()) / (values.std() + 1e-6)
        if values.unique().numel() > 1
        else 0 * values
    )


@pytest.mark.slow
def test_gdpo_normalises_each_reward_function_apart(tmp_path: Path) -> None:
    playground = Playground(tmp_path)
    (tmp_path / "length.py").write_text(LENGTH)
    length = f"{tmp_path}/length.py:compute_score"
    run = playground.run(
        "grpo",
        "algorithm.adv_estimator=gdpo",
        f"reward.functions={{default: [custom, {{name: '{length}', weight: 0.5}}]}}",
        *ONE_STEP,
    )
    batch = Batch.load(run.folder / "tokens" / "000001.safetensors")
    parts = {
        name: torch.tensor([part[name] for part in batch["reward_parts"]]).double()
        for name in ("custom", length)
    }
    summed = torch.cat(
        [
            standard(parts["custom"][rows]) + 0.5 * standard(parts[length][rows])
            for rows in torch.arange(len(batch)).split(4)
        ]
    )
    mask = batch["response_mask"] > 0
    tokens = summed[:, None].expand(mask.shape)[mask]
    wanted = (summed[:, None] - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
    torch.testing.assert_close(
        batch["advantages"].double(), torch.where(mask, wanted, 0.0), rtol=1e-4, atol=1e-5
    )
    assert all(len(part.unique()) > 2 for part in parts.values())


@pytest.mark.slow
def test_rewards_then_kl_then_gae_then_advantages(tmp_path: Path) -> None:
    """AReaL's order: rewards by group, the KL off them, GAE that whitens nothing, advantages over
    the batch."""
    run = Playground(tmp_path).run(
        "ppo",
        "algorithm.reward_norm.mean_level=group",
        "algorithm.reward_norm.std_level=group",
        "algorithm.adv_norm.mean_level=batch",
        "algorithm.adv_norm.std_level=batch",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=abs",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "actor_rollout_ref.actor.optim.lr=0.05",
        "actor_rollout_ref.rollout.temperature=1.0",
        "trainer.save_groups=all",
        "trainer.total_training_steps=2",
    )
    batch = Batch.load(run.folder / "tokens" / "000002.safetensors")
    mask = batch["response_mask"]
    rewards = torch.zeros(batch["response_mask"].shape, dtype=torch.float64)
    last = batch.lengths("response") - 1
    scores = batch["token_level_scores"].sum(-1).double()
    for rows in torch.arange(len(batch)).split(4):
        group = scores[rows]
        scaled = (group - group.mean()) / (group.std() + 1e-5)
        rewards[rows, last[rows]] = scaled if len(group.unique()) > 1 else 0.0
    kl = (batch["old_log_probs"] - batch["ref_log_prob"]).abs().double() * mask
    assert float(kl.max()) > 0.1
    rewards -= 0.5 * kl
    torch.testing.assert_close(batch["token_level_rewards"].double(), rewards, rtol=1e-4, atol=1e-5)

    values = batch["values"].double()
    gae = torch.zeros_like(rewards)
    for i, length in enumerate(batch.lengths("response").tolist()):
        following = 0.0
        running = 0.0
        for t in reversed(range(length)):
            running = float(rewards[i, t] + following - values[i, t]) + 0.95 * running
            gae[i, t] = running
            following = float(values[i, t])
    tokens = gae[mask > 0]
    wanted = torch.where(mask > 0, (gae - tokens.mean()) / (tokens.std() + 1e-5), 0.0)
    torch.testing.assert_close(batch["advantages"].double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        batch["returns"].double(), (gae + values) * mask, rtol=1e-4, atol=1e-4
    )
