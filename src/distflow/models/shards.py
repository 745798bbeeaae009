"""Tensors that lie spread over ranks (`DTensor`), seen in part and whole. A plain tensor is its own part and whole."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Sliceable(Protocol):
    """A tensor, or one in a file of which a part can be read."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it: the same storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it on every rank of its mesh, which all call this; on the mesh's device, wherever the parts are kept."""
    if not isinstance(tensor, DTensor):
        return tensor
    here: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]  # declared as any tensor
    return here.full_tensor()


def device_of(tensor: Tensor) -> torch.device:
    """On which what is computed of it is; parts of a spread tensor may be kept in the host's memory."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def is_spread(model: nn.Module) -> bool:
    """Whether a parameter of it lies over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def square_sum(tensors: Iterable[Tensor]) -> float:
    """Of all entries, in float64; of spread tensors the whole's, on every rank of their mesh, which all call this."""
    sums: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, Tensor] = {}
    for tensor in tensors:
        over = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        own = own_part(tensor.detach()).double().square().sum()
        sums[over] = sums[over] + own if over in sums else own
    return float(sum((_added(own, over) for over, own in sums.items()), start=torch.zeros((), dtype=torch.float64)))


def _added(own: Tensor, over: tuple[DeviceMesh, tuple[Placement, ...]] | None) -> Tensor:
    """The sum of a number over the mesh dimensions along which the tensor that it is of is divided."""
    if over is None:
        return own.cpu()
    mesh, placements = over
    sums = [Partial("sum") if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(own, mesh, sums, run_check=False).full_tensor().cpu()


@torch.no_grad()
def fill(tensor: Tensor, values: Sliceable | Tensor) -> None:
    """Copy values of the whole shape into a tensor; of a spread one each rank takes, and reads, its own part alone."""
    if isinstance(values, DTensor):
        tensor.copy_(values)
        return
    start, shape = _place(tensor)
    if 0 not in shape:
        own_part(tensor).copy_(values[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))])


def at_places(tensor: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the flat places `(n,)` of the whole that this rank holds, as indices of `places`, and what is there."""
    start, shape = _place(tensor)
    inside = torch.ones(len(places), dtype=torch.bool)
    own = torch.zeros_like(places)
    coordinates = torch.unravel_index(places, tensor.shape) if tensor.dim() else ()
    for coordinate, first, length in zip(coordinates, start, shape, strict=True):
        inside &= (coordinate >= first) & (coordinate < first + length)
        own = own * length + coordinate - first
    held = inside.nonzero()[:, 0]
    return held, own_part(tensor.detach()).reshape(-1)[own[held].to(tensor.device)]


def on_any_rank(found: Mapping[str, bool], tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """By the name of each tensor, whether it holds for a part of it on any rank; all ranks of its mesh call this."""
    agreed = dict(found)
    for mesh in dict.fromkeys(t.device_mesh for t in tensors.values() if isinstance(t, DTensor)):
        names = [name for name, t in tensors.items() if isinstance(t, DTensor) and t.device_mesh == mesh]
        agreed |= {
            name: value > 0 for name, value in zip(names, _largest(mesh, [found[n] for n in names]), strict=True)
        }
    return agreed


def _largest(mesh: DeviceMesh, values: list[bool]) -> list[float]:
    own = torch.tensor(values, dtype=torch.float32, device=mesh.device_type)
    return DTensor.from_local(own, mesh, [Partial("max")] * mesh.ndim).full_tensor().tolist()


def _place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where in the whole this rank's part begins, and its shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return start, shape
