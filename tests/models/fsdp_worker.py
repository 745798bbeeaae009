"""One of two gloo ranks that holds half of every weight of a model: its pass over a share of a
batch, by FSDP2."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from distflow.models.loading import load_model
from distflow.models.lora import add_lora, unwrapped
from distflow.training.torch_engine import model_inputs
from tests.training.batches import RAGGED, ragged_batch

SHARES = (list(range(len(RAGGED))), [])  # the second rank runs an empty micro-batch
OUTPUTS = {
    "policy": ("log_probs", "entropy"),
    "padded": ("log_probs", "entropy"),
    "adapter": ("log_probs",),
    "critic": ("values",),
}


def make_model(kind: str, folder: Path) -> nn.Module:
    if kind == "critic":
        return load_model(folder / "model", seed=1, critic=True)
    model = load_model(folder / ("recurrent" if kind == "padded" else "model"))
    return add_lora(model, rank=2, seed=1) if kind == "adapter" else model


def run(model: nn.Module, kind: str, rows: list[int]) -> dict[str, torch.Tensor]:
    """Outputs, and what gradients a weighted sum of all of them has left."""
    micro = ragged_batch().select(rows)
    found = model.packed_forward(
        model_inputs(micro, torch.device("cpu")), OUTPUTS[kind], temperature=0.8
    )
    sum((flat * micro.flat("advantages")).sum() for flat in found.values()).backward()

    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is not None:
            found[f"gradient of {name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad

    return found


def main(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in OUTPUTS:
        model = make_model(kind, folder)
        for layer in unwrapped(model).base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert isinstance(model, FSDPModule)

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # shares of a loss add up
                module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing

        register_fsdp_forward_method(model, "packed_forward")
        torch.save(run(model, kind, SHARES[rank]), folder / f"{kind}-{rank}.pt")
