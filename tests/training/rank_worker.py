"""One gloo rank that trains a tiny model on its share of each mini-batch; four form groups of 1, 2
and 4 ranks."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.algorithms.objectives import PolicyObjective
from distflow.cluster.process_groups import TorchCollective
from distflow.data.batch import Batch
from distflow.models.loading import load_model
from distflow.models.packed_forward import ModelInputs
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.training.batches import RAGGED, ragged_batch

# Samples of each rank: unequal, none for one of them.
SHARES = {
    1: [[0, 1, 2, 3, 4, 5, 6, 7]],
    2: [[], [0, 1, 2, 3, 4, 5, 6, 7]],
    4: [[6, 1, 2, 0, 7], [4], [], [3, 5]],
}
NUM_MINI_BATCHES = 7
FAULTY = 3  # this mini-batch has an advantage that is not a number, on one rank
EMPTY = 4  # no token of this one counts, on any rank
ONE_SAMPLE = 5  # of this one those of a single sample, and so on one rank


def mini_batch(number: int) -> Batch:
    batch = ragged_batch(RAGGED, seed=number)
    generator = torch.Generator().manual_seed(100 + number)
    for name in ("old_log_probs", "ref_log_prob"):
        batch[name] = -4.6 + 0.3 * torch.randn(batch.flat("advantages").shape, generator=generator)
    sample = torch.arange(len(batch)).repeat_interleave(batch.lengths("response"))
    counted = {EMPTY: sample < 0, ONE_SAMPLE: sample == 1}.get(number, sample >= 0)
    batch["response_mask"] = counted.float()

    if number == FAULTY:
        batch["advantages"] = batch.flat("advantages").masked_fill(
            batch.flat("response_ids") < 20, float("nan")
        )

    return batch


def train(
    folder: Path, group: TorchCollective, rows: list[int]
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The weights, the metrics of each step, and how often the model ran in all of them and a
    forward after them."""
    model = load_model(folder / "model")
    passes = count_passes(model)
    engine = TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-3),
        schedule=make_schedule("constant_with_warmup", total_steps=10, warmup_steps=2),
        max_tokens_per_micro_batch=20,
        max_grad_norm=0.05,
        group=group,
    )
    objective = PolicyObjective(
        "vanilla", entropy_coef=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1
    )
    metrics = [
        engine.train_step(mini_batch(n).select(rows), objective) for n in range(NUM_MINI_BATCHES)
    ]
    engine.forward(mini_batch(0).select(rows), ("log_probs",))

    return dict(engine.weights()), {"metrics": metrics, "passes": len(passes)}


def count_passes(model: Any) -> list[int]:
    """A list that grows by the number of packed tokens with each pass of the model."""
    passes: list[int] = []
    forward = model.packed_forward

    def counted(
        inputs: ModelInputs, outputs: tuple[str, ...], *, temperature: float
    ) -> dict[str, torch.Tensor]:
        passes.append(inputs.input_ids.numel())
        return forward(inputs, outputs, temperature=temperature)

    model.packed_forward = counted
    return passes


def main(rank: int, folder: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in SHARES}
    for size, shares in SHARES.items():
        if rank < size:
            weights, found = train(folder, TorchCollective(groups[size]), shares[rank])
            torch.save(weights, folder / f"{size}-{rank}.pt")
            (folder / f"{size}-{rank}.json").write_text(json.dumps(found))
