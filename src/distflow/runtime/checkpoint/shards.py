"""Tensors sharded over ranks: each rank writes its own shards, and a reader loads those that it needs.

The files are those of `torch.distributed.checkpoint`'s Hugging Face storage: safetensors that include the place of each
shard in its whole tensor. That package plans what is written and read, without a process group.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Layout = Callable[[str], Tensor | None]
"""Maps a tensor's name to a tensor with the wanted sharding, or to None if every rank wants the whole."""


@dataclass(frozen=True)
class Shards:
    """One rank's shards of a part's tensors. offsets: of each shard's first element in the whole tensor."""

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, Sequence[int]]

    @property
    def file_metadata(self) -> dict[str, str]:
        """Metadata for the header of the safetensors file."""
        places = {name: {"saved_offsets": list(offset)} for name, offset in self.offsets.items()}
        return {"DCP_SHARDING_INFO": json.dumps(places)}


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def own_shards(tensors: Mapping[str, Tensor], leads: bool) -> Shards:
    """The shards that this rank writes, as views: over all ranks every element is in one of them.

    leads: whether this rank also writes the tensors that every rank has whole.
    """
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({name: tensor for name, tensor in tensors.items() if _is_written_here(tensor, leads)})
    shards, offsets = dict[str, Tensor](), dict[str, Sequence[int]]()
    for item in planner.create_local_plan().items:
        shard = planner.resolve_data(item)
        assert isinstance(shard, Tensor) and item.tensor_data is not None, "the state of an engine is tensors"
        if shard.numel() or not math.prod(item.tensor_data.size):  # a tensor may have fewer rows than there are ranks
            shards[item.index.fqn], offsets[item.index.fqn] = shard.detach(), item.tensor_data.chunk.offsets
    return Shards(shards, offsets)


def read_shards(files: Sequence[Path], layout: Layout) -> dict[str, Tensor]:
    """The tensors of all these files, on the CPU; sharded ones as this rank's shards, loaded in place.

    No rank waits for another. Raises ValueError if shards of a tensor are missing.
    """
    reader = dcp.HuggingFaceStorageReader(str(files[0].parent))
    reader.fs = _Files(files)
    wanted = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), "safetensors holds tensors"
        found = {tuple(chunk.offsets): math.prod(chunk.sizes) for chunk in stored.chunks}
        if sum(found.values()) != math.prod(stored.size):
            raise ValueError(f"shards of '{name}' are missing")
        like = layout(name)
        if isinstance(like, DTensor) and like.shape == stored.size:
            wanted[name] = torch.empty_like(like, dtype=stored.properties.dtype, requires_grad=False)
        else:
            wanted[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no process group is wanted
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as err:  # it is not an Exception
        raise ValueError(str(err)) from err
    return wanted


class _Files(FileSystem):
    """Limits the storage to the files of one part: it would read all safetensors in its folder."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: str | PathLike[str]) -> list[str]:
        return [str(file) for file in self._files]


def _is_written_here(tensor: Tensor, leads: bool) -> bool:
    """Whether this rank writes the tensor: the first of the ranks with the same shard does."""
    if not isinstance(tensor, DTensor):
        return leads
    mesh = tensor.device_mesh
    pairs = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    return _is_first(mesh) and all(index == 0 for index, placement in pairs if placement.is_replicate())


def _is_first(mesh: DeviceMesh) -> bool:
    """Whether this rank is first along the dimensions that the mesh was sliced from; tensors are the same on each."""
    root = mesh._get_root_mesh()
    places = zip(root.mesh_dim_names or (), root.get_coordinate() or (), strict=False)
    return all(place == 0 for name, place in places if name not in (mesh.mesh_dim_names or ()))
