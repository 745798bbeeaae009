"""One of two gloo ranks that share a model: what the checks see of it, with samples that are not
evenly spread."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distflow.checks.check import Wrong
from distflow.checks.gradients import check_gradients
from distflow.checks.optimizers import check_optimizers
from distflow.checks.plain_forward import Ids, logits_of, plainly
from distflow.checks.sharded_passes import ShardedPasses
from distflow.checks.update_records import UpdateRecord, UpdateWatch
from distflow.cluster.process_groups import TorchCollective
from distflow.config import Config, load_config
from distflow.models.loading import load_model
from distflow.models.sharding import Sharding
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.training.batches import TokenMeanLoss, ragged_batch

SEQUENCES = [Ids((3, 4, 5), (6, 7)), Ids((8,), (9, 10, 11))]
SHARES = (list(range(6)), [6, 7])


def passes(model: nn.Module, plain: nn.Module, rank: int) -> None:
    """The first rank has three passes to make, the other one, and one more that fails."""
    turns = ShardedPasses(TorchCollective(), [model, plain])
    with torch.no_grad(), plainly(model):
        for _ in range(3 - 2 * rank):
            for found, wanted in zip(
                logits_of(turns.run, model, SEQUENCES),
                logits_of(turns.run, plain, SEQUENCES),
                strict=True,
            ):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

        turns.finish()


def updates(model: nn.Module, rank: int, folder: Path) -> None:
    """The optimizer's formula on the part of each rank, empty ones too, and the norm of what all
    parts are given."""
    optim = ("lr=1e-2", "scheduler=constant")
    config = load_config(
        "grpo",
        [
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "data.train_files=rows.jsonl",
            "reward.functions={default: [exact_match]}",
            "actor_rollout_ref.actor.max_grad_norm=0.5",
            *(f"actor_rollout_ref.actor.optim.{key}" for key in optim),
        ],
    ).config
    engine = TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-2),
        schedule=make_schedule("constant", total_steps=10),
        max_tokens_per_micro_batch=30,
        max_grad_norm=0.5,
        group=TorchCollective(),
    )

    for step in range(3):
        batch = ragged_batch(seed=step).select(SHARES[rank])
        watch = UpdateWatch("actor", engine, batch, TokenMeanLoss())
        watch.begin(step)
        metrics = engine.train_step(batch, watch)
        record = watch.end(metrics)
        assert metrics["grad_norm"] > 0.5 and record.norm == pytest.approx(0.5, rel=1e-4)
        check_optimizers.run(recorded(record, config, step))
        assert "sharded weights" in str(check_gradients.run(recorded(record, config, step)))

    record.stripes = {
        name: replace(stripe, after=stripe.before) for name, stripe in record.stripes.items()
    }
    with pytest.raises(Wrong, match="moved by 0 at most"):
        check_optimizers.run(recorded(record, config, step))


def recorded(record: UpdateRecord, config: Config, taken: int) -> Any:
    """What the check reads."""
    run = SimpleNamespace(
        spec=SimpleNamespace(data=SimpleNamespace(total_steps=10)),
        training_steps=[],
    )
    return SimpleNamespace(
        run=run,
        config=config,
        updates=[record],
        updates_of=lambda role: [record],
        num_updates={"actor": taken},
    )


def main(rank: int, folder: Path) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = load_model(folder / "model")
    model = load_model(folder / "model", sharding=Sharding(mesh))
    passes(model, plain, rank)
    updates(model, rank, folder)
