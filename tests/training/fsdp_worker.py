"""One gloo rank that trains sharded tiny models on its share of each mini-batch: on meshes of 1, 2 and 4 ranks, and on
one of two replicas of two parts each."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distflow.algorithms import PolicyObjective
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.models.sharded_loading import load_sharded_model
from distflow.models.sharding import DATA, TENSOR, Sharding, shard_model
from distflow.models.value_head import load_value_model
from distflow.runtime.ports.torch_collective import TorchCollective
from distflow.training.collective import Collective
from distflow.training.engine import LossFn
from distflow.training.optim import make_optimizer
from distflow.training.schedule import make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.training.batches import TokenMeanLoss
from tests.training.rank_worker import SHARES, mini_batch

POLICY = PolicyObjective("vanilla", entropy_coef=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1)


def policy(folder: Path, sharding: Sharding | None) -> nn.Module:
    path = folder / "model"
    return load_sharded_model(path, sharding) if sharding else load_model(path)


def tied(folder: Path, sharding: Sharding | None) -> nn.Module:
    path = folder / "tied"
    return load_sharded_model(path, sharding) if sharding else load_model(path)


def critic(folder: Path, sharding: Sharding | None) -> nn.Module:
    path = folder / "tied"
    return load_sharded_model(path, sharding, critic=True, seed=3) if sharding else load_value_model(path, seed=3)


def adapter(folder: Path, sharding: Sharding | None) -> nn.Module:
    model = add_lora(load_model(folder / "model"), rank=4, seed=3)
    if sharding is not None:
        shard_model(model, sharding)
    return model


# By case: the model, the loss, the steps, on which meshes, and what else the engine is made with.
CASES: dict[str, tuple[Callable[[Path, Sharding | None], nn.Module], LossFn, int, tuple[str, ...], dict[str, object]]]
CASES = {
    "policy": (policy, POLICY, 10, ("1", "2", "4", "2t2"), {"max_grad_norm": 0.05}),
    "replicas": (policy, POLICY, 4, ("2x2",), {"max_grad_norm": 0.05}),
    "critic": (critic, TokenMeanLoss(("values",)), 4, ("2", "1t2"), {"max_grad_norm": None}),
    "tied": (tied, POLICY, 4, ("2", "1t2"), {"gradient_checkpointing": True}),
    "adapter": (adapter, POLICY, 4, ("2",), {"gradient_checkpointing": True}),
}


def make_engine(case: str, folder: Path, sharding: Sharding | None, group: Collective) -> TorchTrainEngine:
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


def tensor_mesh(data: int, rank: int) -> DeviceMesh | None:
    """Of `data` rows of two ranks, which compute each layer together; None where this rank is not in it."""
    ranks = torch.arange(2 * data).view(data, 2)
    groups = [dist.new_group(line.tolist()) for line in (*ranks.T, *ranks)]
    own = [group for group in groups if rank in dist.get_process_group_ranks(group)]
    return DeviceMesh.from_group(own, "cpu", mesh=ranks, mesh_dim_names=(DATA, TENSOR)) if rank < 2 * data else None


def main(rank: int, folder: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in SHARES}
    meshes = {str(size): DeviceMesh.from_group(group, "cpu") for size, group in groups.items() if rank < size}
    meshes["2x2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    meshes |= {f"{data}t2": mesh for data in (1, 2) if (mesh := tensor_mesh(data, rank)) is not None}
    for case, (_, _, _, names, _) in CASES.items():
        for name in (name for name in names if name in meshes):
            data = meshes[name][DATA] if "t" in name else meshes[name]
            group = data.get_group() if data.ndim == 1 else groups[data.size()]
            engine = make_engine(case, folder, Sharding(meshes[name]), TorchCollective(group))
            place = data.get_local_rank() if data.ndim == 1 else rank
            metrics = train(case, engine, SHARES[data.size()][place])
            (folder / f"{case}-{name}-{rank}.json").write_text(json.dumps(metrics))
            torch.save(dict(engine.weights()), folder / f"{case}-{name}-{rank}.pt")
