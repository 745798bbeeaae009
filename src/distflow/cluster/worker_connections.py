"""The ports of one of several workers: connect its loops and errors to coordinator, object store and other workers.

In the mode `collective` weights go through process groups of two, the trainer and one worker: gloo between CPUs, nccl
between GPUs, from the memory of one device to that of the other. There is one group per worker instead of one broadcast
for all: a member that dies or stops would break that for everybody, and the rest would have to create another in the
middle of a version. The price is that the trainer sends a bucket once per worker.

Nobody waits forever. The trainer sends on threads, while its training thread waits for the workers' replies, and
operations give up after half of that time, so that a live worker replies why before it is taken for a stalled one.
"""

import os
import secrets
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.cluster.process_groups import Collectives
from distflow.cluster.remote_calls import PeersLate, shorten
from distflow.cluster.remote_sample_queue import RemoteSampleQueue
from distflow.cluster.weights_to_workers import RayWeights, WeightReceivers, put_in_store
from distflow.observe.writing.timing import Waits
from distflow.runtime.early_stop_and_signals import Stop
from distflow.runtime.rollout_loop.loop_thread import on_a_thread
from distflow.runtime.spec import Spec
from distflow.runtime.weight_sync.bucket_files import Carry, Packed, Spoiled, write_bucket
from distflow.runtime.weight_sync.protocol import WeightPort
from distflow.runtime.weight_sync.receiver import IncomingWeights
from distflow.runtime.weight_sync.same_process_weights import LocalWeights, StreamedWeights
from distflow.runtime.worker_inputs import Ports
from distflow.runtime.worker_place_and_dp_groups import Place
from distflow.scheduling.group_states import Version

_OTHERS_ARE_LATE = "Timed out waiting"  # from gloo's message


class WorkerPorts:
    def __init__(self, spec: Spec, place: Place, coordinator: Any, exchange: Any) -> None:
        """coordinator, exchange: handles of the actors. exchange: None if dp groups send each other nothing."""
        self._spec, self._place, self._coordinator, self._exchange = spec, place, coordinator, exchange
        self.stop, self.incoming_weights = Stop(), IncomingWeights()

    def build(self, among: Collectives, waits: Waits, rollout_workers: WeightReceivers | None) -> Ports:
        """rollout_workers: those that only generate, for the leading worker."""
        place = self._place
        among.record(waits)
        weights: WeightPort = self.incoming_weights
        ready, reshard = None, None
        if place.dp_group:
            weights = LocalWeights(waits) if among.mesh is None else StreamedWeights(waits)
            if self._exchange is not None:
                from distflow.cluster.reshard_through_object_store import RayReshard

                reshard = RayReshard(self._exchange, waits)
        elif "rollout" in self._spec.plan.ranks[place.rank].engines:
            ready = self.incoming_weights.ready
        if rollout_workers is not None:
            options = self._spec.options
            run_dir, timeout_s = self._spec.run_dir, options.engine_timeout_s
            carry: Carry = put_in_store
            device = "cpu"
            if options.weight_update_mode == "disk":
                carry = partial(write_bucket, run_dir)
            elif options.weight_update_mode == "collective":
                device = self._spec.plan.ranks[place.rank].device.partition(":")[0]
                carry = Pairs(run_dir, device, timeout_s, rollout_workers.note)
            weights = RayWeights(weights, rollout_workers, carry, timeout_s, waits, device)
        queue = RemoteSampleQueue(self._coordinator, place.generator, place.first, waits, self.stop, ready)
        ports = Ports(queue, weights, among.dp_group, among.data, among.everyone, self._rollout_ended, reshard=reshard)
        return ports if rollout_workers is None else replace(ports, validate=rollout_workers.validate)

    @contextmanager
    def short_errors(self, are_reported: bool) -> Iterator[None]:
        """Shortens the message of an error inside. are_reported: errors are reported to the other workers before this
        one exits, so that they stop waiting. An error that says that others are late is not: the driver finds out
        which."""
        try:
            yield
        except BaseException as err:  # anything that ends this worker, including a requested exit
            if are_reported and isinstance(err, RuntimeError) and _OTHERS_ARE_LATE in str(err):
                raise PeersLate(f"worker {self._place.rank} timed out waiting for other workers: {err}") from err
            shorten(err)
            if are_reported:
                self._fail(err)
            raise

    def _rollout_ended(self, error: BaseException) -> None:
        """Called when the rollout loop here ended. A worker that cancels it is exiting, and has reported any
        failure."""
        if not isinstance(error, CancelledError):
            shorten(error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._coordinator.fail.remote(error)
        if self._exchange is not None:
            self._exchange.fail.remote(error)


TRAINER, WORKER = 0, 1
_Group = Any  # a backend's process group; in torch's stubs it has no send and recv
_FOREVER = timedelta(days=365)
_KEEP_PROCESS = "2"  # a broken nccl group ends only its own kernels, not the trainer's process, as it would by default


@dataclass(frozen=True)
class Pair:
    """A process group of the trainer and one worker. meeting: a file through which they find each other, so that only
    those who can write to the run's folder can join. device: the kind on which both members hold tensors. timeout: of
    one operation."""

    meeting: Path
    device: str
    timeout: timedelta

    @property
    def backend(self) -> str:
        """That of torch for the kind of device: gloo for cpu, nccl for cuda."""
        return dist.get_default_backend_for_device(self.device)

    def join(self, rank: int) -> _Group:
        """Wait for the other member. Raises RuntimeError, as operations do, if it is gone or late."""
        store = dist.FileStore(str(self.meeting), 2)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, 2, self.timeout)
        if self.backend != "nccl":  # of another accelerator
            return dist.Backend._plugins[self.backend.upper()].creator_fn(store, rank, 2, self.timeout)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = _KEEP_PROCESS  # read now: existing groups keep their setting
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)

    def finish(self, work: Any) -> None:
        """Wait for an operation. Raises RuntimeError if it failed; with nccl only a wait with a timeout finds out."""
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
    """A `SentBucket` whose bytes pass through a pair when it is read. tensors: names, dtypes and shapes, in the order
    of sending."""

    pair: Pair
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    def get(self) -> list[tuple[str, Tensor]]:
        try:
            group = _join_trainer(self.pair)
            return [(name, self._receive(group, dtype, shape)) for name, dtype, shape in self.tensors]
        except RuntimeError as err:
            raise Spoiled(
                f"it was not received through the {self.pair.backend} process group: {_first_line(err)}"
            ) from err

    def drop(self) -> None:
        """Both members have met, or never will."""
        self.pair.meeting.unlink(missing_ok=True)

    def _receive(self, group: _Group, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.pair.device)
        if tensor.numel():
            self.pair.finish(group.recv([tensor.view(-1).view(torch.uint8)], TRAINER, 0))
        return tensor


@dataclass(frozen=True)
class _Sending:
    """A bucket being sent to a worker. group: the trainer's side of the pair."""

    bucket: tuple[Version, int]
    pair: Pair
    group: "Future[_Group]"
    done: "Future[None]"


class Pairs:
    """The trainer's side: a `Carry`. A pair serves one sync, and is recreated for a rejected bucket, so that a
    replacement of a dead worker, or one behind a broken connection, is like any other."""

    def __init__(self, run_dir: Path, device: str, timeout_s: float | None, note: Callable[[str], None]) -> None:
        """device: see `Pair`; buckets are packed there. timeout_s: time for a worker to reply. note: called with the
        reason if a bucket was not sent."""
        self._run_dir, self._device, self._note = run_dir, device, note
        self._timeout = _FOREVER if timeout_s is None else timedelta(seconds=timeout_s / 2)
        self._sending: dict[int, _Sending] = {}

    def __call__(self, version: Version, number: int, packed: Packed, to: Collection[int]) -> dict[int, InPair]:
        """Returns at once: the bytes are sent while the workers receive them."""
        tensors = tuple((name, dtype, shape) for name, dtype, shape, _ in packed)
        for rank in to:
            self._sending[rank] = self._send((version, number), packed, rank)
        return {rank: InPair(self._sending[rank].pair, tensors) for rank in to}

    def _send(self, bucket: tuple[Version, int], packed: Packed, rank: int) -> _Sending:
        before = self._sending.get(rank)
        if before is not None and before.bucket == bucket and before.done.done() and (err := before.done.exception()):
            self._note(f"the trainer had not sent bucket {bucket[1]} to worker {rank} before: {_first_line(err)}")
        if before is not None and bucket[1] > 0 and before.bucket != bucket:
            pair, group = before.pair, before.group
        else:
            meeting = self._run_dir / f".meeting-{secrets.token_hex(4)}"
            pair = Pair(meeting, self._device, self._timeout)
            group = on_a_thread(partial(pair.join, TRAINER))
        return _Sending(bucket, pair, group, on_a_thread(partial(_send, group, packed, pair)))


def _send(group: "Future[_Group]", packed: Packed, pair: Pair) -> None:
    joined = group.result()
    for *_, values in packed:
        if len(values):
            pair.finish(joined.send([values], WORKER, 0))


def _first_line(err: BaseException) -> str:
    return str(err).partition("\n")[0]
