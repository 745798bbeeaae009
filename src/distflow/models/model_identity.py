"""Identifies a model by a fingerprint, since a path's files may change."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import cached_file

from distflow.errors import UserError
from distflow.models.model_paths import is_local, resolve_path, why_not_loaded
from distflow.models.sharding import own_part

_PIECES = 64
_PIECE_BYTES = 2**16


def identity(path: str, revision: str | None = None) -> dict[str, str]:
    """`path`, `revision` and `fingerprint`: the commit of a hub id; for a folder a hash of its
    files' names and sizes, of the content of small ones, and of samples of the weights, all of
    which training changes.

    Raises UserError for a missing folder, and for a model that is not on the hub.
    """
    source = resolve_path(path)
    if is_local(source):
        return {"path": source, "revision": "", "fingerprint": _folder_hash(Path(source))}

    try:
        config = cached_file(source, "config.json", revision=revision)
    except OSError as error:
        raise UserError(
            f"model '{source}' cannot be loaded: {why_not_loaded(source, str(error))}"
        ) from error

    assert config is not None, "it raises where there is none"
    return {"path": source, "revision": revision or "", "fingerprint": Path(config).parent.name}


def _folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        step = max(size // _PIECES, _PIECE_BYTES)

        with file.open("rb") as opened:
            for start in (*range(0, size, step), max(size - _PIECE_BYTES, 0)):
                opened.seek(start)
                digest.update(opened.read(_PIECE_BYTES))

    return digest.hexdigest()[:12]


def bit_hash(tensor: Tensor) -> str:
    """A hash of all bits of a tensor (this rank's part of a sharded one) with shape and dtype: the
    sums of rows and columns, with 1,024 integers per row, weighted by odd numbers so that opposite
    changes do not cancel."""
    own = own_part(tensor.detach()).contiguous()
    raw = own.reshape(-1).view(torch.uint8)
    rows = torch.nn.functional.pad(raw, (0, -len(raw) % 8192)).view(torch.int64).view(-1, 1024)

    total = 0
    for factor, sums in ((1, rows.sum(0)), (0x9E3779B97F4A7C15, rows.sum(1))):
        weights = torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)
        total += factor * int((sums * weights).sum())

    return f"{tuple(own.shape)} {own.dtype} {total % 2**64:016x}"
