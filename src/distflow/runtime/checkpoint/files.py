"""Files of checkpoints: parts as safetensors or JSON, a manifest of checksums, and writes that
survive kills. Folders of checkpoints: their contents, in order, and the leftovers of a kill.

Of tensors sharded over ranks each rank writes its own shards, and a reader loads those that it
needs. The files are those of `torch.distributed.checkpoint`'s Hugging Face storage: safetensors
that include the place of each shard in its whole tensor. That package plans what is written and
read, without a process group.

The folder may contain other files. Only folders named like our checkpoints are removed.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Final, TypeGuard

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing, write_atomically
from distflow.untrusted_files import (
    MAX_JSON_VALUES,
    check_tensors,
    count_values,
    open_file,
    read_file,
)

MANIFEST = "manifest.json"
FORMAT = 1
PARTIAL: Final = ".partial"
REMOVED: Final = ".removed"

_MAX_MANIFEST_BYTES: Final = 4 * 2**20
_CHECKPOINT: Final = re.compile(r"step-\d{6,}")
_PART: Final = re.compile(r"\w+(-rank\d+)?\.(safetensors|json)")

Layout = Callable[[str], Tensor | None]
"""Maps a tensor's name to a tensor with the wanted sharding, or to None if every rank wants the
whole."""


class CheckpointError(UserError):
    """A checkpoint could not be written, or none can be read."""


class DamagedError(Exception):
    """A checkpoint's files differ from those written. `CheckpointStore` then falls back on another
    one."""


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint folder."""

    step: int
    serial: int
    """Orders checkpoints by creation, which steps do not after a rollback."""
    metric: float | None
    """What `keep_best` compares, higher is better."""
    files: Mapping[str, FileEntry]
    """By name; see `part_of`."""


@dataclass(frozen=True)
class Shards:
    """One rank's shards of a part's tensors."""

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, Sequence[int]]
    """Of each shard's first element in the whole tensor."""

    @property
    def file_metadata(self) -> dict[str, str]:
        """Metadata for the header of the safetensors file."""
        places = {name: {"saved_offsets": list(offset)} for name, offset in self.offsets.items()}
        return {"DCP_SHARDING_INFO": json.dumps(places)}


def write_part(folder: Path, name: str, part: object) -> None:
    """Write a part to its file on disk; a kill leaves no partial file under its name.

    part: tensors by name (a non-empty mapping of only tensors), a rank's shards of tensors, or a
    JSON value with string keys. Tensors may share storage or be strided; each is stored whole.
    """
    is_tensors = isinstance(part, Shards) or is_all_tensors(part)
    with replacing(folder / f"{name}{'.safetensors' if is_tensors else '.json'}") as aside:
        if isinstance(part, Shards):
            save_file(separate(part.tensors), aside, part.file_metadata)
        elif is_all_tensors(part):
            save_file(separate(part), aside)
        else:
            aside.write_text(json.dumps(part))


def is_all_tensors(part: object) -> TypeGuard[Mapping[str, Tensor]]:
    return (
        isinstance(part, Mapping)
        and bool(part)
        and all(isinstance(value, Tensor) for value in part.values())
    )


def shard_name(part: str, rank: int) -> str:
    return f"{part}-rank{rank}"


def part_of(file: str) -> str:
    """The part that a file holds, in whole or as a rank's shards."""
    return Path(file).stem.partition("-")[0]


def read_part(files: Sequence[Path], layout: Layout | None = None) -> object:
    """Read a part from its files. layout: the sharding of its tensors; without it they are whole,
    on the CPU."""
    if files[0].suffix == ".json":
        text = read_file(files[0], files[0].parent)
        if count_values(text) > MAX_JSON_VALUES:
            raise ValueError(f"it holds more than {MAX_JSON_VALUES:,} values")
        return json.loads(text)

    for file in files:
        check_tensors(file, file.parent)
    if layout is None and files[0].stem == part_of(files[0].name):
        return load_file(files[0])

    return read_shards(files, layout or (lambda name: None))


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def own_shards(tensors: Mapping[str, Tensor], leads: bool) -> Shards:
    """The shards that this rank writes, as views: over all ranks every element is in one of them.

    leads: whether this rank also writes the tensors that every rank has whole.
    """
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(
        {name: tensor for name, tensor in tensors.items() if _is_written_here(tensor, leads)}
    )

    shards = dict[str, Tensor]()
    offsets = dict[str, Sequence[int]]()
    for item in planner.create_local_plan().items:
        shard = planner.resolve_data(item)
        assert isinstance(shard, Tensor) and item.tensor_data is not None, (
            "the state of an engine is tensors"
        )

        # a tensor may have fewer rows than there are ranks
        if shard.numel() or not math.prod(item.tensor_data.size):
            shards[item.index.fqn] = shard.detach()
            offsets[item.index.fqn] = item.tensor_data.chunk.offsets

    return Shards(shards, offsets)


def read_shards(files: Sequence[Path], layout: Layout) -> dict[str, Tensor]:
    """The tensors of all these files, on the CPU; sharded ones as this rank's shards, loaded in
    place.

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
            wanted[name] = torch.empty_like(
                like, dtype=stored.properties.dtype, requires_grad=False
            )
        else:
            wanted[name] = torch.empty(stored.size, dtype=stored.properties.dtype)

    try:
        with warnings.catch_warnings():
            # no process group is wanted
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
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
    return _is_first(mesh) and all(
        index == 0 for index, placement in pairs if placement.is_replicate()
    )


def _is_first(mesh: DeviceMesh) -> bool:
    """Whether this rank is first along the dimensions that the mesh was sliced from; tensors are
    the same on each."""
    root = mesh._get_root_mesh()
    places = zip(root.mesh_dim_names or (), root.get_coordinate() or (), strict=False)
    return all(place == 0 for name, place in places if name not in (mesh.mesh_dim_names or ()))


def describe(path: Path) -> FileEntry:
    with open_file(path, path.parent) as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = {"format": FORMAT, **asdict(manifest)}
    write_atomically(
        folder / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises DamagedError if it is missing or was changed."""
    try:
        body = json.loads(read_file(folder / MANIFEST, folder, _MAX_MANIFEST_BYTES))
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise DamagedError(f"{MANIFEST} does not match its own checksum")
        if (found := body.pop("format")) != FORMAT:
            known = f"this version of distflow reads {FORMAT}; use the version that wrote it"
            raise DamagedError(f"{MANIFEST} has format {found!r}, and {known}")

        files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
        if any(name != Path(name).name for name in files):
            raise DamagedError(f"{MANIFEST} names files of another folder")
        if not all(isinstance(body[key], int) for key in ("step", "serial")):
            raise DamagedError(f"{MANIFEST} counts no steps")
        return Manifest(files=files, **body)
    except OSError as err:
        raise DamagedError(f"{MANIFEST} cannot be read: {err.strerror}") from err
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise DamagedError(f"{MANIFEST} is no manifest") from err


def verify(folder: Path) -> Manifest:
    """Check every file against the manifest, and return it. Raises DamagedError with the file's
    name."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != entry.num_bytes:
                raise DamagedError(f"{name} has {found} bytes instead of {entry.num_bytes}")
            if describe(path) != entry:
                raise DamagedError(f"{name} does not match its checksum")
        except OSError as err:
            raise DamagedError(f"{name} cannot be read: {err.strerror}") from err

    return manifest


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no storage, as safetensors requires; tied ones become
    copies."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if (
            storage in seen
            or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        ):
            tensor = tensor.clone(memory_format=torch.contiguous_format)

        seen.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor

    return out


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, complete or damaged, by name."""
    return sorted(_folders(folder, ""))


def by_age(folder: Path) -> list[Path]:
    """Checkpoints with readable manifests, oldest first."""
    serials = {path: serial_of(path) for path in checkpoints_in(folder)}
    return sorted((path for path in serials if serials[path] >= 0), key=serials.__getitem__)


def serial_of(path: Path) -> int:
    """A checkpoint's place in the order of creation; -1 if its manifest cannot be read."""
    try:
        return read_manifest(path).serial
    except DamagedError:
        return -1


def next_serial(folder: Path) -> int:
    return max(map(serial_of, checkpoints_in(folder)), default=-1) + 1


def partial_of(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` while it is written."""
    return folder / f"step-{step:06d}{PARTIAL}"


def parts_in(partial: Path) -> list[Path]:
    return sorted(
        path for path in _entries(partial) if _PART.fullmatch(path.name) and path.name != MANIFEST
    )


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of a killed save or removal."""
    for path in _folders(folder, PARTIAL):
        remove(path)
    for path in _folders(folder, REMOVED):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint, which is renamed first: a kill leaves no part of it under its name, and
    a process that still writes to it fails. Of a link only the link goes."""
    aside = path.with_name(path.name.removesuffix(PARTIAL) + REMOVED)
    for old in (aside, path):
        if old.is_symlink():
            old.unlink()

    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(path.rename(aside), ignore_errors=True)


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _folders(folder: Path, end: str) -> list[Path]:
    """Folders named like a checkpoint, followed by `end`."""
    named = (path for path in _entries(folder) if path.name.endswith(end))
    return [
        path
        for path in named
        if _CHECKPOINT.fullmatch(path.name.removesuffix(end))
        and path.is_dir()
        and not (end and path.is_symlink())
    ]


def _entries(folder: Path) -> list[Path]:
    if folder.is_dir():
        return [Path(entry) for entry in os.scandir(folder)]
    return []
