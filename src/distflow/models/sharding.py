"""Shards a model over ranks: tensor parallelism by the plan of its family, and FSDP2 with summed
gradients, as needed by losses over exact global counts. Fills and reads sharded tensors (`DTensor`)
in part and in whole; for a plain tensor both are the tensor itself.
"""

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, parallel
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedConfig, PreTrainedModel

from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.models.lora import unwrapped

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADS_DIM = 2  # of (batch, tokens, heads, width), the input of norms of queries and keys
_STYLES: dict[str, Callable[[], parallel.ParallelStyle]] = {
    "colwise": parallel.ColwiseParallel,
    "rowwise": parallel.RowwiseParallel,
    # each rank has some of the heads: the weight is whole on all ranks, its gradient is summed over
    # them
    "replicated_with_grad_allreduce": lambda: parallel.SequenceParallel(
        sequence_dim=_HEADS_DIM, use_local_output=True
    ),
}
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of the one-dimensional `mesh` its columns and rows of the matrices in the
    plan, in place; an untied head is divided by rows and gives whole logits. Everything else is
    whole on every rank, which computes it from the same tokens.

    Raises UserError for a family without a plan, a plan with other kinds of layers, an adapter, and
    sizes not divisible by the number of ranks.
    """
    causal = unwrapped(model)
    size = mesh.size()
    check_divisible(causal.config, size, adapted=causal is not model)
    plan = _plan_of(causal.config)

    for name, module in causal.base_model.named_modules():
        if style := plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)):
            parallel.parallelize_module(module, mesh, _STYLES[style]())

    head = causal.get_output_embeddings()
    if head is not None and head.weight is not causal.get_input_embeddings().weight:
        parallel.parallelize_module(
            head, mesh, parallel.ColwiseParallel(output_layouts=Replicate())
        )


def check_divisible(config: PreTrainedConfig, size: int, adapted: bool) -> None:
    """Check that `size` ranks can compute the layers of such a model together. adapted: with an
    adapter. Raises UserError as `divide_layers` does."""
    text = config.get_text_config()
    plan = _plan_of(config)
    family = config.model_type

    if not plan:
        raise UserError(
            f"the family '{family}' has no plan for tensor parallelism: allocate only data "
            "parallel ranks (d)"
        )
    if unknown := sorted(set(plan.values()) - _STYLES.keys()):
        raise UserError(
            f"the family '{family}' divides layers in ways that are not implemented yet "
            f"({', '.join(unknown)}): allocate only data parallel ranks (d)"
        )
    if adapted:
        raise UserError(
            "adapters (lora_rank) are not divided over tensor parallel ranks yet: allocate only d"
        )

    for name in _DIVIDED:
        if getattr(text, name) % size:
            raise UserError(
                f"{size} tensor parallel ranks (t{size}) do not divide the model's "
                f"{name}={getattr(text, name)}"
            )


def _plan_of(config: PreTrainedConfig) -> dict[str, str]:
    return getattr(config.get_text_config(), "base_model_tp_plan", None) or {}


DATA = "dp"
REPLICA = "dp_replicate"
SHARD = "dp_shard"
TENSOR = "tp"


@dataclass(frozen=True)
class Sharding:
    """The ranks to shard over, and the precision.

    mesh: one-dimensional; or of two named dimensions, replicas and shards: each row holds all
    weights, and rows sum their gradients. A further last dimension is named `tp`, along which ranks
    compute each layer together; then the first ones are named `dp`, or `dp_replicate` and
    `dp_shard`. compute_dtype: of gathered weights and the model's computation; stored weights, and
    sums of gradients over ranks, are float32. on_host: keep weights, gradients and an optimizer's
    moments in host memory, whatever the mesh's device; a layer is copied to the device when it
    runs.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype = torch.float32
    on_host: bool = False


def shard_model(model: nn.Module, sharding: Sharding) -> None:
    """Leave each rank its part of every weight, in place; `packed_forward` gathers a layer at a
    time.

    Embeddings and head, which may be tied, are gathered together for the whole pass: the head runs
    in chunks. Gradients are summed over the ranks, not averaged, as the backward pass goes; ranks
    that compute a layer together count as one, and get the same tokens. All ranks run the model
    equally often. Raises UserError for a family that does not name its layers, and as
    `divide_layers` does.
    """
    mesh = sharding.mesh
    dims = sharding.mesh.mesh_dim_names or ()
    if TENSOR in dims:
        divide_layers(model, mesh[TENSOR])
        mesh = mesh[tuple(name for name in dims if name != TENSOR)]

    # log-probs and logits are views; the warning concerns in-place changes, and there are none
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=sharding.compute_dtype, reduce_dtype=torch.float32
    )
    place = (
        fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if sharding.on_host
        else fsdp.OffloadPolicy()
    )
    names = unwrapped(model)._no_split_modules or ()

    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        family = unwrapped(model).config.model_type
        raise UserError(
            f"actor.strategy=fsdp gathers a model layer by layer, and the family '{family}' does "
            "not name its layers (_no_split_modules): set actor.strategy=torch"
        )

    for module in (*layers, model):
        # the root too: between passes only parts exist, as the parameters that optimizers know
        fsdp.fully_shard(
            module, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=True
        )

    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support a scaling sum

    for name in ("packed_forward", "packed_logits"):
        fsdp.register_fsdp_forward_method(model, name)


class Sliceable(Protocol):
    """A tensor, or one in a file that can be read in part."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same storage."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank of its mesh, which all call this; on the mesh's device,
    wherever the parts are."""
    if not isinstance(tensor, DTensor):
        return tensor
    # declared as any tensor
    here: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return here.full_tensor()


def device_of(tensor: Tensor) -> torch.device:
    """The device of results computed with a tensor; parts of a sharded one may be in host
    memory."""
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    return tensor.device


def is_spread(model: nn.Module) -> bool:
    """Whether any of the model's parameters is sharded."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def square_sum(tensors: Iterable[Tensor]) -> float:
    """The sum of squares of all entries, in float64; of sharded tensors as a whole, on every rank
    of the mesh, which all call this."""
    sums: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, Tensor] = {}
    for tensor in tensors:
        over = None
        if isinstance(tensor, DTensor):
            over = (tensor.device_mesh, tensor.placements)
        own = own_part(tensor.detach()).double().square().sum()
        sums[over] = sums[over] + own if over in sums else own

    total = torch.zeros((), dtype=torch.float64)
    for over, own in sums.items():
        if over is not None:  # summed over the dimensions along which the tensors are divided
            mesh, placements = over
            parts = [
                Partial("sum") if placement.is_shard() else Replicate() for placement in placements
            ]
            own = DTensor.from_local(own, mesh, parts, run_check=False).full_tensor()

        total = total + own.cpu()

    return float(total)


@torch.no_grad()
def fill(tensor: Tensor, values: Sliceable | Tensor) -> None:
    """Copy values of the whole shape into a tensor; for a sharded one each rank reads only its own
    part."""
    if isinstance(values, DTensor):
        tensor.copy_(values)
        return

    start, shape = _place(tensor)
    if 0 not in shape:
        own_part(tensor).copy_(
            values[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
        )


def at_places(tensor: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The elements at flat positions `(n,)` of the whole that this rank holds: indices into
    `places`, and values."""
    if not isinstance(tensor, DTensor):
        return torch.arange(len(places)), tensor.detach().reshape(-1)[send(places, tensor.device)]

    start, shape = _place(tensor)
    inside = torch.ones(len(places), dtype=torch.bool)
    own = torch.zeros_like(places)

    coordinates = torch.unravel_index(places, tensor.shape) if tensor.dim() else ()

    for coordinate, first, length in zip(coordinates, start, shape, strict=True):
        inside &= (coordinate >= first) & (coordinate < first + length)
        own = own * length + coordinate - first

    here = inside.nonzero()[:, 0]
    return here, own_part(tensor.detach()).reshape(-1)[own[here].to(tensor.device)]


def on_any_rank(found: Mapping[str, bool], tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """By tensor name, whether `found` holds for a part on any rank; all ranks of its mesh call
    this."""
    names_of_mesh = defaultdict[DeviceMesh, list[str]](list)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            names_of_mesh[tensor.device_mesh].append(name)

    agreed = dict(found)
    for mesh, names in names_of_mesh.items():
        own = torch.tensor([float(found[name]) for name in names], device=mesh.device_type)
        largest = DTensor.from_local(own, mesh, [Partial("max")] * mesh.ndim).full_tensor()
        for name, value in zip(names, largest.tolist(), strict=True):
            agreed[name] = value > 0

    return agreed


def _place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part begins in the whole, and its shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return start, shape


def empty_model(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """The model with parameters without memory; its buffers are real, as they are not stored in
    files."""
    register = nn.Module.register_parameter

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # tied parameters remain tied
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    # its argument has another name
    nn.Module.register_parameter = emptied  # type: ignore[method-assign, assignment]

    try:
        return auto_class.from_config(config, dtype=torch.float32)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def read_own_parts(model: PreTrainedModel, folder: Path) -> list[str]:
    """Fill a model from its folder's safetensors, only with this rank's part of sharded weights;
    returns the names of weights that are not stored, which keep arbitrary values. Raises UserError
    for another shape or format."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text("utf-8"))
        files = {name: folder / file for name, file in index["weight_map"].items()}
    elif (folder / _SINGLE).is_file():
        with safe_open(folder / _SINGLE, "pt") as tensors:
            files = dict.fromkeys(tensors.keys(), folder / _SINGLE)
    else:
        raise UserError(
            f"'{folder}' has no safetensors ({_INDEX} or {_SINGLE}), which alone can be read in "
            "parts"
        )

    stored = model.state_dict().keys()
    own: dict[str, Tensor] = dict(model.named_parameters())

    own |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    for name in sorted(own.keys() & files.keys()):
        with safe_open(files[name], "pt") as tensors:  # mapped memory stays until a file is closed
            values = tensors.get_slice(name)
            if list(values.get_shape()) != list(own[name].shape):
                raise UserError(
                    f"'{name}' of {files[name]} has the shape {values.get_shape()}, the model's is "
                    f"{list(own[name].shape)}"
                )

            fill(own[name], values)

    return sorted(own.keys() - files.keys())
