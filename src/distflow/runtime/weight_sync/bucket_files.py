"""Buckets of weights for other processes: their bytes, a hash, and their transport as files in the
run's folder.

There is one file per bucket, in a folder per version, removed when all engines have it. A file gets
its name when it is complete and on disk. The next start removes files of a killed run.
"""

import hashlib
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from distflow.errors import UserError
from distflow.observe.crash_safe_files import replacing
from distflow.runtime.checkpoint.files import separate
from distflow.runtime.run_errors import writing_to
from distflow.runtime.weight_sync.protocol import Bucket
from distflow.scheduling.group_states import Version

Packed = list[tuple[str, str, tuple[int, ...], Tensor]]
"""Name, dtype, shape and bytes (uint8, one dimension) of each tensor."""

WEIGHTS: Final = ".weights"
APPEARS_WITHIN_S = 3.0


class Spoiled(ValueError):
    """The received bucket differs from the one sent."""


class SentBucket(Protocol):
    """A reference to a bucket that was put for others: small and picklable."""

    def get(self) -> list[tuple[str, Tensor]]:
        """The tensors in separate memory, in any order. Raises Spoiled if the content differs from
        what was
        put, UserError if it is not visible from here at all."""

    def drop(self) -> None:
        """Free the bucket, which nobody reads any more."""


Carry = Callable[[Version, int, Packed, Collection[int]], Mapping[int, SentBucket]]
"""Puts a bucket of a version (with its number, from 0) where the workers of these ranks can read
it, each through its own reference."""


def pack(weights: Bucket, device: str | None = "cpu") -> Packed:
    """The tensors as bytes on a kind of device, sharing their memory if they are there. device:
    None leaves them where they are."""
    packed = []
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = tensor.detach().to(device or tensor.device).contiguous().view(-1)
        packed.append((name, dtype, tuple(tensor.shape), values.view(torch.uint8)))
    return packed


def unpack(packed: Packed) -> list[tuple[str, Tensor]]:
    """Tensors that share the memory of the bytes."""
    return [
        (name, _tensor(getattr(torch, dtype), shape, values))
        for name, dtype, shape, values in packed
    ]


def hash_of(packed: Packed) -> str:
    """A hash of all names, dtypes, shapes and bytes, independent of their order; uses as many
    threads as torch. The same bytes on the host and on another device have different hashes."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        hashes = sorted(pool.map(_hash_of_tensor, packed))
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _hash_of_tensor(each: tuple[str, str, tuple[int, ...], Tensor]) -> str:
    name, dtype, shape, values = each
    digest = hashlib.sha256(f"{name} {dtype} {shape}\n".encode())
    if values.device.type != "cpu":
        values = _sum_of(values).cpu()
    digest.update(values.numpy().data)
    return digest.hexdigest()


def _sum_of(values: Tensor) -> Tensor:
    """A checksum of bytes, computed on their device: the sum of 64-bit words, each times an odd
    number of its place, modulo 2**64. A change of one word always changes it."""
    num_whole = len(values) // 8 * 8

    # a copy: bytes may begin where a word may not
    words = values[:num_whole].clone().view(torch.int64)

    total = torch.zeros(1, dtype=torch.int64, device=values.device)
    for first, part in enumerate(words.split(_WORDS)):
        places = torch.arange(len(part), device=values.device) + first * _WORDS
        total += (part * (places * _ODD | 1)).sum()

    tail = values[num_whole:].long()
    return total + (tail * (torch.arange(len(tail), device=values.device) * _ODD * 2 + _ODD)).sum()


_WORDS = 2**20
_ODD = 0x1E3779B97F4A7C15


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], values: Tensor) -> Tensor:
    if not len(values):  # torch's strides of it do not fit other dtypes
        return torch.empty(shape, dtype=dtype)
    return values.view(dtype).view(shape)


@dataclass(frozen=True)
class InFile:
    """A `SentBucket` that is a file."""

    path: Path
    num_bytes: int

    def get(self) -> list[tuple[str, Tensor]]:
        self._wait()
        try:
            num_bytes = self.path.stat().st_size  # it must not be larger than expected
            if num_bytes == self.num_bytes:
                return list(load(self.path.read_bytes()).items())
        except (OSError, SafetensorError, KeyError, RuntimeError) as err:
            raise Spoiled(f"{self.path} differs from what was written there: {err}") from err

        raise Spoiled(f"{self.path} has {num_bytes} bytes, but {self.num_bytes} were written")

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        for folder in (self.path.parent, self.path.parent.parent):
            with suppress(OSError):  # another bucket exists
                folder.rmdir()

    def _wait(self) -> None:
        """Wait for the file, which a network file system may show a moment later."""
        since = time.monotonic()
        while not self.path.exists():
            if time.monotonic() - since > APPEARS_WITHIN_S:
                raise UserError(
                    f"{self.path}, which holds new weights, is not there on "
                    f"{socket.gethostname()}: with actor_rollout_ref.actor.weight_update_mode=disk "
                    "the run's folder (trainer.default_local_dir) must be on a file system that "
                    "all machines of the run see at the same path; else leave it at store"
                )

            time.sleep(0.05)


def write_bucket(
    run_dir: Path, version: Version, number: int, packed: Packed, to: Collection[int]
) -> dict[int, InFile]:
    """See `Carry`. Raises UserError if the disk is full or not writable."""
    folder = run_dir / WEIGHTS / f"{version.restart}-{version.step:06d}"
    path = folder / f"bucket-{number:05d}.safetensors"

    with writing_to(run_dir):
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
        with replacing(path) as aside:
            save_file(separate(dict(unpack(packed))), aside)
        return dict.fromkeys(to, InFile(path, path.stat().st_size))


def remove_weights(run_dir: Path) -> None:
    """Remove versions that were being sent when their run ended."""
    with suppress(OSError):  # there are none
        shutil.rmtree(run_dir / WEIGHTS)
