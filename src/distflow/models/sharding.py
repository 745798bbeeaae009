"""Shards a model over ranks: tensor and expert parallelism by the plans that `transformers` has for
its family, and FSDP2 with summed gradients, as needed by losses over exact global counts. Fills and
reads sharded tensors (`DTensor`) in part and in whole; for a plain tensor both are the tensor
itself.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.distributed import DistributedConfig
from transformers.modeling_utils import LoadStateDictConfig

from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.models.choose_attention import why_rows_stay_whole
from distflow.models.context_share import CONTEXT
from distflow.models.lora import unwrapped

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INTERLEAVED = ("packed_colwise", "packed_rowwise")
"""Styles of plans that leave a rank several separate pieces of a weight."""
_HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of a layer's experts."""

DATA = "dp"
REPLICA = "dp_replicate"
SHARD = "dp_shard"
TENSOR = "tp"
EXPERT_SHARD = "ep_shard"
EXPERT = "ep"


@dataclass(frozen=True)
class Sharding:
    """The ranks to shard over, and the precision.

    mesh: one-dimensional; or of two named dimensions, replicas and shards: each row holds all
    weights, and rows sum their gradients. A further last dimension is named `tp`, along which ranks
    compute each layer together; then the first ones are named `dp`, or `dp_replicate` and
    `dp_shard`. experts: the same ranks once more, if experts are divided over others than `tp`:
    along the last dimension, `ep`, ranks have different experts; along `ep_shard`, parts of the
    same ones; along `dp_replicate`, if it is there, the same. compute_dtype: of gathered weights
    and the model's computation; stored weights, and sums of gradients over ranks, are float32.
    on_host: keep weights, gradients and an optimizer's moments in host memory, whatever the mesh's
    device; a layer is copied to the device when it runs. context: the ranks that divide packed rows
    between them, which are neighbours along the first dimensions.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype = torch.float32
    on_host: bool = False
    experts: DeviceMesh | None = None
    context: ProcessGroup | None = None


def why_not_divided(
    config: PreTrainedConfig, tensor: int, experts: int, adapted: bool, context: int = 1
) -> str | None:
    """Why so many ranks cannot compute each layer of such a model together, have its experts
    between them, or divide rows; None if they can. Without a number of their own, experts are
    divided over the ranks that compute a layer together. adapted: with an adapter."""
    reason = why_rows_stay_whole(config) if context > 1 else None
    if reason:
        return reason

    text = config.get_text_config()
    family = config.model_type
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}

    if experts > 1 and not _has_experts(config):
        return f"transformers has no plan to divide experts of the family '{family}' (e)"

    if tensor > 1:
        if not plan:
            return f"transformers has no plan to divide layers of the family '{family}' (t)"
        if adapted:
            return "adapters (lora_rank) are not divided over tensor parallel ranks (t) yet"

        for module, style in plan.items():
            if style in _INTERLEAVED and not (".experts" in module and _has_experts(config)):
                return f"the family '{family}' divides {module} into several pieces for each rank"
        for name in _HEADS:
            number = getattr(text, name, None) or 0
            if number % tensor:
                return f"t{tensor} does not divide the model's {name}={number}"

    for name in _EXPERTS:
        number = getattr(text, name, None) or 0
        if _has_experts(config) and number % max(tensor, experts):
            letter = "e" if experts > 1 else "t"
            return f"{letter}{max(tensor, experts)} does not divide the model's {name}={number}"

    return None


def _has_experts(config: PreTrainedConfig) -> bool:
    """Whether the family's experts can be on different ranks, to which tokens are sent."""
    plan: dict[str, str] = getattr(config.get_text_config(), "base_model_ep_plan", None) or {}
    return "ep_dispatch_experts" in plan.values()


def _divide_layers(model: nn.Module, tensor: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Leave each rank its part of the matrices and its experts, in place, as the family's plans
    say. Everything else is whole on every rank.

    tensor: the ranks that compute each layer from the same tokens. experts: those that have the
    experts between them, and send each other tokens for these; by default the same. Raises
    UserError if they cannot."""
    causal = unwrapped(model)
    number = 1 if experts is None else experts.size()
    reason = why_not_divided(causal.config, tensor.size(), number, adapted=causal is not model)
    if reason:
        raise UserError(f"{reason}: allocate data parallel ranks (d) instead")

    with_experts = tensor if experts is None else experts
    sizes = DistributedConfig(tp_size=tensor.size())
    if _has_experts(causal.config):
        sizes.ep_size = with_experts.size()

    def get_mesh(dims: str | tuple[str, ...]) -> DeviceMesh:
        return with_experts if dims == "ep" else tensor

    head = causal.get_output_embeddings()
    is_tied = head is not None and head.weight is causal.get_input_embeddings().weight
    if is_tied:  # the plans find each weight by one name
        head.weight = nn.Parameter(head.weight.detach(), head.weight.requires_grad)
    causal.maybe_distribute_model(causal, sizes, SimpleNamespace(get_mesh=get_mesh))
    del causal.config.distributed_config  # it would be saved with the model
    if is_tied:
        head.weight = causal.get_input_embeddings().weight


def shard_model(model: nn.Module, sharding: Sharding) -> None:
    """Leave each rank its part of every weight, in place; `packed_forward` gathers a layer at a
    time.

    Embeddings and head, which may be tied, are gathered together for the whole pass: the head runs
    in chunks. Gradients are summed over the ranks, not averaged, as the backward pass goes; ranks
    that compute a layer together count as one, and get the same tokens. All ranks run the model
    equally often. Raises UserError for a family that does not name its layers, or whose layers or
    experts the ranks cannot divide.
    """
    setattr(unwrapped(model), CONTEXT, sharding.context)
    mesh = sharding.mesh
    experts = sharding.experts
    if TENSOR in (mesh.mesh_dim_names or ()):
        _divide_layers(model, mesh[TENSOR], None if experts is None else experts[EXPERT])
        mesh = _without(TENSOR, mesh)

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

    shard = partial(
        fsdp.fully_shard, mp_policy=policy, offload_policy=place, reshard_after_forward=True
    )
    if experts is not None:
        for module in _modules_on(experts, model):
            shard(module, mesh=_without(EXPERT, experts))

    for module in (*layers, model):
        # the root too: between passes only parts exist, as the parameters that optimizers know
        shard(module, mesh=mesh)

    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support a scaling sum

    for name in ("packed_forward", "packed_logits"):
        fsdp.register_fsdp_forward_method(model, name)


def _without(name: str, mesh: DeviceMesh) -> DeviceMesh:
    return mesh[tuple(each for each in mesh.mesh_dim_names or () if each != name)]


def _modules_on(mesh: DeviceMesh, model: nn.Module) -> list[nn.Module]:
    """The modules with weights of their own that are divided along the last dimension of a mesh."""
    found = []
    for module in model.modules():
        own = [each for each in module.parameters(recurse=False) if isinstance(each, DTensor)]
        if any(each.device_mesh == mesh[EXPERT] for each in own):
            found.append(module)
    return found


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
            # a dimension that is divided twice has a placement that is no `Shard`
            parts = [
                Replicate() if placement.is_replicate() else Partial("sum")
                for placement in placements
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

    missing = list[str]()
    for name in sorted(own):
        sources = [name] if name in files else _sources(model, name, own[name])
        if not files.keys() >= set(sources):
            missing.append(name)
        elif sources == [name]:
            values = _StoredTensor(files[name], name)
            if values.get_shape() != list(own[name].shape):
                raise UserError(
                    f"'{name}' of {files[name]} has the shape {values.get_shape()}, the model's is "
                    f"{list(own[name].shape)}"
                )
            fill(own[name], values)
        else:
            _fill_joined(model, name, {each: _StoredTensor(files[each], each) for each in sources})

    return missing


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file, which is closed after each read: mapped memory stays until then."""

    file: Path
    name: str

    def get_shape(self) -> list[int]:
        with safe_open(self.file, "pt") as tensors:
            return list(tensors.get_slice(self.name).get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        with safe_open(self.file, "pt") as tensors:
            return tensors.get_slice(self.name)[index]


def _sources(model: PreTrainedModel, name: str, tensor: Tensor) -> list[str]:
    """The names under which files hold a weight: `transformers` joins the experts of a layer."""
    return [*revert_weight_conversion(model, {name: torch.empty(tensor.shape, device="meta")})]


@torch.no_grad()
def _fill_joined(model: PreTrainedModel, name: str, stored: Mapping[str, _StoredTensor]) -> None:
    """Fill a weight from tensors with other names. Raises UserError if they do not fit it."""
    module_name, _, own_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    parameter = model.get_parameter(name)
    if not own_part(parameter).numel():
        return

    mapping = get_model_conversion_mapping(model)
    convert_and_load_state_dict_in_model(
        model, dict(stored), LoadStateDictConfig(weight_mapping=mapping, dtype=torch.float32)
    )
    model._weight_conversions = None  # those of this weight, if it is left
    loaded = model.get_parameter(name)
    setattr(module, own_name, parameter)  # FSDP and tied modules know this one
    if loaded is parameter:
        raise UserError(f"'{next(iter(stored))}' does not fit the model's '{name}'")

    own_part(parameter).copy_(own_part(loaded))
