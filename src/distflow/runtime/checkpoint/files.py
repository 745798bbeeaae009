"""Files of a checkpoint: parts as safetensors or JSON, a manifest of checksums, and writes that survive kills."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distflow.observe.files import replacing, write_atomically
from distflow.runtime.checkpoint.shards import Layout, Shards, read_shards

MANIFEST = "manifest.json"
FORMAT = 1


class DamagedError(Exception):
    """A checkpoint's files are not those that were written. `CheckpointStore` then falls back on another."""


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint folder. serial: orders checkpoints by their time of creation, as steps do not after a
    rollback. metric: what `keep_best` compares, higher is better. files: by name; see `part_of`."""

    step: int
    serial: int
    metric: float | None
    files: Mapping[str, FileEntry]


def write_part(folder: Path, name: str, part: object) -> None:
    """Write a part to its file and the disk; after a kill there is no partial file under its name.

    part: tensors by name (a mapping of nothing else, and not empty), a rank's shards of such, or a JSON value with
    string keys. Tensors may share storage or be strided; each is stored whole.
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
    return isinstance(part, Mapping) and bool(part) and all(isinstance(value, Tensor) for value in part.values())


def shard_name(part: str, rank: int) -> str:
    """The name under which a rank writes its shards of a part."""
    return f"{part}-rank{rank}"


def part_of(file: str) -> str:
    """The part that a file holds, whole or a rank's shards of it."""
    return Path(file).stem.partition("-")[0]


def read_part(files: Sequence[Path], layout: Layout | None = None) -> object:
    """The part in its files. layout: the sharding of its tensors; without it they are whole, on the CPU."""
    if files[0].suffix == ".json":
        return json.loads(files[0].read_text())
    if layout is None and files[0].stem == part_of(files[0].name):
        return load_file(files[0])
    return read_shards(files, layout or (lambda name: None))


def describe(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = {"format": FORMAT, **asdict(manifest)}
    write_atomically(folder / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedError if it is missing or was changed."""
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        digest = body.pop("sha256")
        if digest != _digest(body) or body.pop("format") != FORMAT:
            raise DamagedError(f"{MANIFEST} does not match its own checksum")
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
    """The manifest, after every file was checked against it. Raises DamagedError naming the file."""
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
    """Contiguous tensors that share no storage, as safetensors requires; tied ones become copies."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor
    return out


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
