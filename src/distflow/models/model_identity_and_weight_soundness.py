"""Identifies a model by a fingerprint, since a path's files may change, and finds weights that are
not finite or implausibly large, e.g. 1e30 after a bit flip.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers.utils import cached_file

from distflow.device_transfer import read_numbers
from distflow.errors import UserError
from distflow.models.model_paths_and_folder_checks import is_local, resolve_path, why_not_loaded
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
        digest = hashlib.sha256()
        for file in sorted(path for path in Path(source).iterdir() if path.is_file()):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                step = max(size // _PIECES, _PIECE_BYTES)
                for start in (*range(0, size, step), max(size - _PIECE_BYTES, 0)):
                    opened.seek(start)
                    digest.update(opened.read(_PIECE_BYTES))
        return {"path": source, "revision": "", "fingerprint": digest.hexdigest()[:12]}
    try:
        config = cached_file(source, "config.json", revision=revision)
    except OSError as error:
        raise UserError(
            f"model '{source}' cannot be loaded: {why_not_loaded(source, str(error))}"
        ) from error
    assert config is not None, "it raises where there is none"
    return {"path": source, "revision": revision or "", "fingerprint": Path(config).parent.name}


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


LARGEST: Final = 65504.0
"""The largest number of float16, into which the weights of published models fit; healthy ones stay
below 1,000."""

GROWTH: Final = 1000.0
"""How many times its largest element (at least 1) a tensor may grow to: far beyond what training
does, which moves an element by about the learning rate per step."""


def magnitudes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """The largest absolute value of each tensor (this rank's part of a sharded one); NaN if it
    contains one."""
    found = dict[str, tuple[Tensor, Tensor]]()
    for name, tensor in tensors:
        if (part := own_part(tensor.detach())).numel():
            found[name] = torch.aminmax(part)
    ends = read_numbers([end for both in found.values() for end in both])
    pairs = zip(found, ends[::2], ends[1::2], strict=True)
    # both are NaN if one is
    return {name: high if high >= -low else -low for name, low, high in pairs}


def unsound(found: Mapping[str, float], start: Mapping[str, float] | None = None) -> list[str]:
    """Descriptions of tensors with implausible magnitudes.

    start: their magnitudes when last known to be sound; for tensors without one, only `LARGEST`
    counts.
    """
    limits = {name: min(GROWTH * max(value, 1.0), LARGEST) for name, value in (start or {}).items()}
    wrong = [(name, value, limits.get(name, LARGEST)) for name, value in found.items()]
    return [
        f"'{name}' holds {value:.3g} (limit {limit:g})"
        for name, value, limit in wrong
        if not value <= limit
    ]
