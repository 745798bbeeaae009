"""One of three gloo ranks that divide packed rows: outputs and gradients of each family, and what
is kept for the backward pass of a long sequence."""

import json
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from distflow.cluster.process_groups import ProcessGroups
from distflow.data.batch import Batch
from distflow.models.loading import load_model
from distflow.models.sharding import whole
from distflow.planning.layouts import Layout, Sizes, process_groups
from distflow.planning.plan import Plan
from distflow.training.torch_engine import TorchScorer, checkpoint_activations
from tests.training.batches import ragged_batch

FAMILIES = ("qwen3", "gpt2", "qwen3_moe", "deepseek_v3")
LAYOUTS = (
    Layout("1c3", "fsdp", (0, 1, 2), Sizes(context=3)),
    Layout("1c2", "fsdp", (0, 1), Sizes(context=2)),
)
PLAN = Plan("grpo", (), (), LAYOUTS, process_groups(LAYOUTS), ("gloo",))
# (prompt, response): three responses to one prompt, one that crosses every border, and tiny ones
LENGTHS = ((12, 7), (12, 3), (12, 20), (3, 60), (1, 1), (5, 0))
LONG = ((8, 2040),)
OUTPUTS = ("log_probs", "entropy")


def mixed_batch() -> Batch:
    batch = ragged_batch(LENGTHS)
    prompts = list(batch.flat("prompt_ids").split([prompt for prompt, _ in LENGTHS]))
    batch["prompt_ids"] = torch.cat([prompts[0], prompts[0], prompts[0], *prompts[3:]])
    return batch


def heats(batch: Batch) -> Tensor:
    """A temperature for each response token."""
    return torch.linspace(0.5, 1.5, batch.flat("advantages").numel())


def loss_of(found: dict[str, Tensor], batch: Batch) -> Tensor:
    advantages = batch.flat("advantages").to(found["log_probs"].dtype)
    return (advantages * found["log_probs"] - 0.3 * found["entropy"]).sum() / 50


def kept_bytes(model: nn.Module, batch: Batch) -> int:
    """Of tensors that the backward pass needs, but weights."""
    weights = {id(parameter) for parameter in model.parameters()}
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights and not tensor.is_leaf:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no other has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = TorchScorer(model, max_tokens_per_micro_batch=4096).compute(batch, OUTPUTS)
        loss_of(found, batch)

    return sum(storages.values())


def main(rank: int, folder: Path) -> None:
    groups = ProcessGroups(PLAN, [(0, 1, 2)], timedelta(minutes=3))
    for layout in LAYOUTS:
        if rank not in layout.ranks:
            continue

        sharding = groups.sharding(layout.ranks, layout, rank, "cpu")
        for family in FAMILIES:
            model = load_model(folder / family, sharding=sharding)
            if layout.role == "1c2":
                checkpoint_activations(model.train())
            batch = mixed_batch()
            found = TorchScorer(model).compute(batch, OUTPUTS, heats(batch))
            loss_of(found, batch).backward()
            grads = {name: whole(p.grad) for name, p in model.named_parameters()}
            outputs = {name: values.detach() for name, values in found.items()}
            torch.save((outputs, grads), folder / f"{family}-{layout.role}-{rank}.pt")

        model = load_model(folder / "qwen3", sharding=sharding)
        kept = kept_bytes(model, ragged_batch(LONG))
        (folder / f"kept-{layout.role}-{rank}.json").write_text(json.dumps(kept))
