"""What a run hands to its losses where several steps make the advantages, worked out again from its
columns."""

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
def test_gdpo_normalises_each_reward_function_apart(tmp_path):
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
