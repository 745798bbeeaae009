"""The ports of one of several workers: connect its loops and errors to coordinator, object store
and other workers."""

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from distflow.cluster.collective_weight_transport import Pairs
from distflow.cluster.process_groups import Collectives
from distflow.cluster.remote_calls import PeersLate
from distflow.cluster.remote_sample_queue import RemoteSampleQueue
from distflow.cluster.weights_to_workers import RayWeights, WeightReceivers, put_in_store
from distflow.observe.writing.timing import Waits
from distflow.runtime.spec import Spec
from distflow.runtime.stop_signals import Stop
from distflow.runtime.weight_sync.bucket_files import Carry, write_bucket
from distflow.runtime.weight_sync.protocol import EnginePort, WeightPort
from distflow.runtime.weight_sync.receiver import IncomingWeights
from distflow.runtime.weight_sync.same_process_weights import LocalWeights, StreamedWeights
from distflow.runtime.worker_inputs import Ports
from distflow.runtime.worker_place import Place

_OTHERS_ARE_LATE = "Timed out waiting"  # from gloo's message


class WorkerPorts:
    def __init__(self, spec: Spec, place: Place, coordinator: Any) -> None:
        """coordinator: the actor's handle."""
        self._spec = spec
        self._place = place
        self._coordinator = coordinator
        self.stop = Stop()
        self.incoming_weights = IncomingWeights()

    def build(
        self, among: Collectives, waits: Waits, rollout_workers: WeightReceivers | None
    ) -> Ports:
        """rollout_workers: those that only generate, for the leading worker."""
        place = self._place
        among.record(waits)

        engine: EnginePort = self.incoming_weights
        weights: WeightPort | None = None
        ready = None
        reshard = None
        if place.dp_group:
            local = LocalWeights(waits) if among.sharding is None else StreamedWeights(waits)

            engine = local
            weights = local

            if any(channel.kind == "exchange" for channel in self._spec.plan.channels):
                from distflow.cluster.reshard_through_object_store import RayReshard

                reshard = RayReshard(self._coordinator, waits)
        elif "rollout" in self._spec.plan.ranks[place.rank].engines:
            ready = self.incoming_weights.ready

        if rollout_workers is not None:
            settings = self._spec.config.actor_rollout_ref
            run_dir = self._spec.run_dir
            timeout_s = settings.rollout.timeout_s

            carry: Carry = put_in_store
            device = "cpu"
            if settings.actor.weight_update_mode == "disk":
                carry = partial(write_bucket, run_dir)
            elif settings.actor.weight_update_mode == "collective":
                device = self._spec.plan.ranks[place.rank].device.partition(":")[0]
                carry = Pairs(run_dir, device, timeout_s)

            assert weights is not None, "the leading worker trains"
            weights = RayWeights(weights, rollout_workers, carry, timeout_s, waits, device)

        queue = RemoteSampleQueue(
            self._coordinator, place.generator, place.first, waits, self.stop, ready
        )
        ports = Ports(
            queue,
            engine,
            weights,
            among.dp_group,
            among.data,
            among.everyone,
            self._rollout_ended,
            reshard=reshard,
        )
        if rollout_workers is None:
            return ports

        return replace(ports, validate=rollout_workers.validate)

    @contextmanager
    def errors_reported(self) -> Iterator[None]:
        """Errors inside are reported to the other workers before this one exits, so that they stop
        waiting. An error that says that others are late is not: the driver finds out which."""
        try:
            yield
        except BaseException as err:  # anything that ends this worker, including a requested exit
            if isinstance(err, RuntimeError) and _OTHERS_ARE_LATE in str(err):
                raise PeersLate(
                    f"worker {self._place.rank} timed out waiting for other workers: {err}"
                ) from err
            self._fail(err)
            raise

    def _rollout_ended(self, error: BaseException) -> None:
        """Called when the rollout loop here ended. A worker that cancels it is exiting, and has
        reported any failure."""
        if not isinstance(error, CancelledError):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._coordinator.fail.remote(error)
