"""One gloo rank that trains sharded tiny models on its share of each mini-batch: on the meshes of
plans of 1, 2 and 4 ranks, of two replicas of two parts each, and of ranks that compute layers
together or divide packed rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distflow.algorithms.objectives import PolicyObjective
from distflow.cluster.process_groups import ProcessGroups, TorchCollective
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.models.sharding import Sharding, at_places, shard_model, square_sum, whole
from distflow.planning.layouts import Layout, Sizes, process_groups
from distflow.planning.plan import Plan
from distflow.runtime.checkpoint.files import own_shards
from distflow.training.engine import Collective, LossFn
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.training.batches import TokenMeanLoss
from tests.training.rank_worker import SHARES, mini_batch

# By the mesh's name: replicas x shards, c ranks that divide packed rows, t that compute layers
# together, and e with different experts.
LAYOUTS = {
    "1": Layout("1", "fsdp", (0,), Sizes()),
    "2": Layout("2", "fsdp", (0, 1), Sizes(data=2)),
    "4": Layout("4", "fsdp", (0, 1, 2, 3), Sizes(data=4)),
    "2x2": Layout("2x2", "fsdp", (0, 1, 2, 3), Sizes(data=4), shard=2),
    "1t2": Layout("1t2", "fsdp", (0, 1), Sizes(tensor=2)),
    "2t2": Layout("2t2", "fsdp", (0, 1, 2, 3), Sizes(data=2, tensor=2)),
    "2x1t2": Layout("2x1t2", "fsdp", (0, 1, 2, 3), Sizes(data=2, tensor=2), shard=1),
    "2e2": Layout("2e2", "fsdp", (0, 1), Sizes(data=2, expert=2)),
    "4e2": Layout("4e2", "fsdp", (0, 1, 2, 3), Sizes(data=4, expert=2)),
    "2x2e2": Layout("2x2e2", "fsdp", (0, 1, 2, 3), Sizes(data=4, expert=2), shard=2),
    "1c2": Layout("1c2", "fsdp", (0, 1), Sizes(context=2)),
    "2c2": Layout("2c2", "fsdp", (0, 1, 2, 3), Sizes(data=2, context=2)),
    "1c4": Layout("1c4", "fsdp", (0, 1, 2, 3), Sizes(context=4)),
    "2x2c2": Layout("2x2c2", "fsdp", (0, 1, 2, 3), Sizes(data=2, context=2), shard=2),
    "1c2t2": Layout("1c2t2", "fsdp", (0, 1, 2, 3), Sizes(context=2, tensor=2)),
    "1c4e2": Layout("1c4e2", "fsdp", (0, 1, 2, 3), Sizes(context=4, expert=2)),
    "2t2e4": Layout("2t2e4", "fsdp", (0, 1, 2, 3), Sizes(data=2, tensor=2, expert=4)),
}
PLAN = Plan(
    "grpo", (), (), tuple(LAYOUTS.values()), process_groups(tuple(LAYOUTS.values())), ("gloo",)
)
POLICY = PolicyObjective("vanilla", entropy_coef=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1)


def policy(folder: Path, sharding: Sharding | None) -> nn.Module:
    path = folder / "model"
    return load_model(path, sharding=sharding)


def policy_on_host(folder: Path, sharding: Sharding | None) -> nn.Module:
    return policy(folder, replace(sharding, on_host=True) if sharding else None)


def tied(folder: Path, sharding: Sharding | None) -> nn.Module:
    path = folder / "tied"
    return load_model(path, sharding=sharding)


def critic(folder: Path, sharding: Sharding | None) -> nn.Module:
    path = folder / "tied"
    return load_model(path, sharding=sharding, critic=True, seed=3)


def experts(folder: Path, sharding: Sharding | None) -> nn.Module:
    return load_model(folder / "experts", sharding=sharding)


def fused(folder: Path, sharding: Sharding | None) -> nn.Module:
    """Queries, keys and values are one matrix, gate and up another."""
    return load_model(folder / "fused", sharding=sharding)


def adapter(folder: Path, sharding: Sharding | None, name: str = "model") -> nn.Module:
    model = add_lora(load_model(folder / name), rank=4, seed=3)
    if sharding is not None:
        shard_model(model, sharding)
    return model


CLIPPED = {"max_grad_norm": 0.05}
CHECKPOINTED = {"gradient_checkpointing": True}
CONTEXTS = ("1c2", "2c2", "1c4", "2x2c2", "1c2t2")
EXPERTS = ("2", "2e2", "4e2", "2x2e2", "2t2", "2t2e4")
# By case: the model, the loss, the steps, on which meshes, and what else the engine is made with.
CASES: dict[
    str,
    tuple[
        Callable[[Path, Sharding | None], nn.Module],
        LossFn,
        int,
        tuple[str, ...],
        dict[str, object],
    ],
]
CASES = {
    "policy": (
        policy,
        POLICY,
        7,
        ("1", "2", "4", "2x2", "2t2", "2x1t2", *CONTEXTS),
        {"max_grad_norm": 0.05},
    ),
    "on-host": (policy_on_host, POLICY, 4, ("2", "2t2"), {"max_grad_norm": 0.05}),
    "critic": (
        critic,
        TokenMeanLoss(("values",)),
        4,
        ("2", "2x2", "1t2", "2c2"),
        {"max_grad_norm": None},
    ),
    "tied": (tied, POLICY, 4, ("2", "1t2", "1c2"), {"gradient_checkpointing": True}),
    "experts": (experts, POLICY, 4, (*EXPERTS, "2c2", "1c4e2"), CLIPPED),
    "fused": (fused, POLICY, 4, ("1t2",), {"max_grad_norm": None}),
    "adapter": (adapter, POLICY, 4, ("2", "2x2", "2c2"), CHECKPOINTED),
    "lora-experts": (partial(adapter, name="experts"), POLICY, 4, ("2", "4e2"), CHECKPOINTED),
}


def make_engine(
    case: str, folder: Path, sharding: Sharding | None, group: Collective
) -> TorchTrainEngine:
    make, _, _, _, options = CASES[case]
    model = make(folder, sharding)
    return TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-3),
        schedule=make_schedule("constant_with_warmup", total_steps=20, warmup_steps=2),
        max_tokens_per_micro_batch=40,
        group=group,
        **options,  # type: ignore[arg-type]  # of the engine's constructor
    )


def train(case: str, engine: TorchTrainEngine, rows: list[int]) -> list[dict[str, float]]:
    _, loss, num_steps, _, _ = CASES[case]
    return [engine.train_step(mini_batch(step).select(rows), loss) for step in range(num_steps)]


def main(rank: int, folder: Path) -> None:
    groups = ProcessGroups(PLAN, [(0, 1, 2, 3)], timedelta(minutes=3))
    for case, (_, _, _, names, _) in CASES.items():
        for layout in (LAYOUTS[name] for name in names if rank in LAYOUTS[name].ranks):
            sharding = groups.sharding(layout.ranks, layout, rank, "cpu")
            group = TorchCollective(groups.of(layout.line("data", rank)))
            engine = make_engine(case, folder, sharding, group)
            metrics = train(case, engine, SHARES[layout.sizes.data][layout.data_place(rank)])
            check_places(engine)
            name = f"{case}-{layout.role}-{rank}"
            (folder / f"{name}.json").write_text(json.dumps(metrics))
            torch.save(dict(engine.weights()), folder / f"{name}.pt")
            shards = own_shards(engine.state().tensors, leads=rank == 0)
            save_file(dict(shards.tensors), folder / f"{name}.safetensors", shards.file_metadata)


def check_places(engine: TorchTrainEngine) -> None:
    """This rank knows which part of each weight it has, and the norm of all."""
    weights = engine.state().trained_weights().values()
    for weight in weights:
        held, found = at_places(weight, torch.arange(weight.numel()))
        assert torch.equal(found, whole(weight).flatten()[held])

    wanted = sum(float(whole(weight).double().square().sum()) for weight in weights)
    assert square_sum(weights) == pytest.approx(wanted)
