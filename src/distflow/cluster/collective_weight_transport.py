"""Buckets of weights through process groups of two, the trainer and one worker, in the mode
`collective`: gloo between CPUs, nccl between GPUs, from the memory of one device to that of the
other.

There is one group per worker instead of one broadcast for all: a member that dies or stops would
break that for everybody, and the rest would have to create another in the middle of a version. The
price is that the trainer sends a bucket once per worker.

Nobody waits forever. The trainer sends on threads, while its training thread waits for the workers'
replies, and operations give up after half of that time, so that a live worker replies why before it
is taken for a stalled one.
"""

import os
import secrets
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.runtime.rollout_loop.loop_thread import on_a_thread
from distflow.runtime.weight_sync.bucket_files import Packed, Spoiled
from distflow.scheduling.group_states import Version

TRAINER = 0
WORKER = 1
_Group = Any  # a backend's process group; in torch's stubs it has no send and recv
_FOREVER = timedelta(days=365)
# a broken nccl group ends only its own kernels, not the trainer's process, as it would by default
_KEEP_PROCESS = "2"


@dataclass(frozen=True)
class Pair:
    """A process group of the trainer and one worker. meeting: a file through which they find each
    other, so that only those who can write to the run's folder can join. device: the kind on which
    both members hold tensors. timeout: of one operation."""

    meeting: Path
    device: str
    timeout: timedelta

    @property
    def backend(self) -> str:
        """That of torch for the kind of device: gloo for cpu, nccl for cuda."""
        return dist.get_default_backend_for_device(self.device)

    def join(self, rank: int) -> _Group:
        """Wait for the other member. Raises RuntimeError, as operations do, if it is gone or
        late."""
        store = dist.FileStore(str(self.meeting), 2)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, 2, self.timeout)
        if self.backend != "nccl":  # of another accelerator
            return dist.Backend._plugins[self.backend.upper()].creator_fn(
                store, rank, 2, self.timeout
            )

        # read now: existing groups keep their setting
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = _KEEP_PROCESS
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout

        return dist.ProcessGroupNCCL(store, rank, 2, options)

    def finish(self, work: Any) -> None:
        """Wait for an operation. Raises RuntimeError if it failed; with nccl only a wait with a
        timeout finds out."""
        if self.backend == "nccl":
            work.wait(self.timeout)
        else:
            work.wait()


@lru_cache(maxsize=1)
def _join_trainer(pair: Pair) -> _Group:
    """The worker's group for the current sync; a failure is not kept."""
    return pair.join(WORKER)


@dataclass(frozen=True)
class InPair:
    """A `SentBucket` whose bytes pass through a pair when it is read. tensors: names, dtypes and
    shapes, in the order of sending."""

    pair: Pair
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    def get(self) -> list[tuple[str, Tensor]]:
        try:
            group = _join_trainer(self.pair)
            return [
                (name, self._receive(group, dtype, shape)) for name, dtype, shape in self.tensors
            ]
        except RuntimeError as err:
            raise Spoiled(
                f"it was not received through the {self.pair.backend} process group: "
                f"{_first_line(err)}"
            ) from err

    def drop(self) -> None:
        """Both members have met, or never will."""
        self.pair.meeting.unlink(missing_ok=True)

    def _receive(self, group: _Group, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.pair.device)
        if tensor.numel():
            self.pair.finish(group.recv([tensor.view(-1).view(torch.uint8)], TRAINER, 0))
        return tensor


class Pairs:
    """The trainer's side: a `Carry`. A pair serves one sync, so that a replacement of a dead worker
    is like any other."""

    def __init__(self, run_dir: Path, device: str, timeout_s: float | None) -> None:
        """device: see `Pair`; buckets are packed there. timeout_s: time for a worker to reply."""
        self._run_dir = run_dir
        self._device = device

        if timeout_s is None:
            self._timeout = _FOREVER
        else:
            self._timeout = timedelta(seconds=timeout_s / 2)

        self._pairs: dict[int, tuple[Pair, Future[_Group]]] = {}
        """By the worker's rank, with the trainer's side of each."""

    def __call__(
        self, version: Version, number: int, packed: Packed, to: Collection[int]
    ) -> dict[int, InPair]:
        """Returns at once: the bytes are sent while the workers receive them. A worker whose bytes
        cannot be sent notices it, and says so."""
        if number == 0:
            self._pairs = {rank: self._open() for rank in to}
        tensors = tuple((name, dtype, shape) for name, dtype, shape, _ in packed)

        sent = {}
        for rank in to:
            pair, group = self._pairs[rank]
            on_a_thread(partial(_send, group, packed, pair))
            sent[rank] = InPair(pair, tensors)

        return sent

    def _open(self) -> "tuple[Pair, Future[_Group]]":
        meeting = self._run_dir / f".meeting-{secrets.token_hex(4)}"
        pair = Pair(meeting, self._device, self._timeout)
        return pair, on_a_thread(partial(pair.join, TRAINER))


def _send(group: "Future[_Group]", packed: Packed, pair: Pair) -> None:
    joined = group.result()
    for *_, values in packed:
        if len(values):
            pair.finish(joined.send([values], WORKER, 0))


def _first_line(err: BaseException) -> str:
    return str(err).partition("\n")[0]
