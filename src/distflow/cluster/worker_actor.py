"""A worker as a Ray actor: the process that runs its rank's part of the plan."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from distflow import __version__
from distflow.cluster.coordinator_actor import Progress
from distflow.cluster.failures import PeersLate
from distflow.cluster.log_forwarding import RemoteView, Teller, remote_callbacks
from distflow.cluster.object_store import reply, shorten
from distflow.cluster.process_groups import Collectives
from distflow.cluster.reshard_columns import RayReshard
from distflow.cluster.reward_actors import pools_of
from distflow.cluster.rollout_workers import RolloutWorkers
from distflow.cluster.sample_queue import AgreedStop, RaySampleQueue
from distflow.cluster.weight_sync import Fleet, RayWeights, carrier_of
from distflow.launch.build_worker import build_worker
from distflow.launch.run_setup import Start, note_early_end, note_resume, open_store, write_facts
from distflow.observe.writing.terminal import TerminalView
from distflow.rewards.pool.domain_pools import take_pool
from distflow.rollout.engine import Receipt
from distflow.runtime import fault_injection
from distflow.runtime.checkpoint.state import restore, set_generators
from distflow.runtime.engine_watch import write_stacks
from distflow.runtime.rank_info import Place, kept_share
from distflow.runtime.recorder import Recorder
from distflow.runtime.resources import build_resources
from distflow.runtime.spec import Spec
from distflow.runtime.step_metrics import ValidationResults
from distflow.runtime.user_calls.sync_calls import Callbacks
from distflow.runtime.weight_sync.buckets import SentBucket
from distflow.runtime.weight_sync.protocol import LocalWeights, WeightPort
from distflow.runtime.weight_sync.receiver import Arrivals
from distflow.runtime.weight_sync.streamed import StreamedWeights
from distflow.runtime.worker import Worker
from distflow.runtime.worker_inputs import Ports, WorkerInputs
from distflow.scheduling.groups import Version

_OTHERS_ARE_LATE = "Timed out waiting"  # from gloo's message


@dataclass(frozen=True)
class Built:
    """What a worker reports of its resources. version: of its distflow."""

    version: str
    facts: dict[str, object]
    num_parameters: int


class WorkerActor:
    """`build`, then `run`. Weights arrive meanwhile, on other threads."""

    def __init__(
        self,
        spec: Spec,
        place: Place,
        coordinator: Any,
        meeting: Path,
        exchange: Any = None,
        reward_actors: Sequence[Any] = (),
    ) -> None:
        """coordinator, exchange, reward_actors: handles of the actors. There is no exchange where dp groups send each
        other nothing, and there are no reward actors where reward functions run beside the worker. meeting: a file
        over which training workers find each other."""
        os.umask(0o077)
        place.home.enter()
        fault_injection.arm(place.rank)
        self._spec, self._place, self._coordinator, self._meeting = spec, place, coordinator, meeting
        self._exchange, self._reward_actors = exchange, reward_actors
        self._stop, self._arrivals = AgreedStop(), Arrivals()
        self._rollout_workers = RolloutWorkers(partial(self.note, "warning"))
        self._recorder: Future[Recorder] = Future()
        self._entered: Future[Worker] = Future()

    def build(self) -> Built:
        """Build engines and services. Raises UserError."""
        fault_injection.reach("build")
        try:
            self._spec.pipeline()  # loads the user's modules, and sets threads as for a run of one process
            torch.set_num_threads(self._place.threads)
            self._among = among = Collectives.join(self._spec, self._place, self._meeting)
            own = self._spec.plan.ranks[self._place.rank]
            start_pool = pools_of(self._reward_actors) if self._reward_actors else take_pool
            self._resources = build_resources(self._spec.factories, own, among.data, among.mesh, start_pool)
        except BaseException as err:
            shorten(err)
            raise
        return Built(__version__, dict(self._resources.facts), self._resources.num_parameters)

    def run(self, start: Start, differences: list[str], others: Mapping[int, Any]) -> int:
        """This worker's part of the whole run; returns the steps consumed in all.

        differences: from the checkpoint. others: for the leading worker, the workers that only generate, by rank.
        """
        spec, place = self._spec, self._place
        progress: Progress = reply(self._coordinator.progress.remote())
        state = restore(start.checkpoint, self._resources)[0] if start.checkpoint else {}
        tell = Teller(self._coordinator)
        with Recorder(
            spec,
            progress.total_steps,
            progress.restart,
            start.resumed_at,
            remote_callbacks(tell) if place.leads else Callbacks(),
            part=place.part,
            view=cast(TerminalView, RemoteView(tell, place)),
            speaks=not place.dp_group or place.rank == place.dp_group[0],
            share=kept_share(spec.plan, place.dp_groups, place.rank),
        ) as recorder:
            with recorder.phases("start"):
                if place.leads:
                    write_facts(spec, self._resources.facts, recorder, progress.total_steps)
                    if start.checkpoint:
                        note_resume(recorder, start.checkpoint, differences)
                self._recorder.set_result(recorder)
                for rank, worker in others.items():
                    self._rollout_workers.join(rank, worker)
                ports = self._ports(recorder, sends=bool(others))
                stop, version, store = self._stop, progress.version, open_store(spec)
                entered = build_worker(
                    WorkerInputs(spec, place.rank, self._resources, ports, recorder, store, stop, state, version)
                )
            with entered:
                set_generators(start.checkpoint, spec.options.seed, place.part)
                self._entered.set_result(entered)
                with self._report_failure():
                    steps = entered.training_loop() if place.dp_group else entered.serve()
            if place.leads:
                self._note_end(recorder, progress.total_steps)
        tell.end()
        return steps

    def take(self, version: Version, number: int, sent: SentBucket, wanted: str) -> str | None:
        """See `Arrivals`."""
        return self._arrivals.take(version, number, sent, wanted)

    def serve(self, version: Version, num_buckets: int | None) -> Receipt:
        """See `Arrivals`."""
        return self._arrivals.serve(version, num_buckets)

    def alive(self) -> None:
        """Replied to on a thread of its own, whatever the others do."""

    def join(self, rank: int, worker: Any) -> None:
        """A rollout worker has started in place of one that is gone."""
        self._rollout_workers.join(rank, worker)
        self._coordinator.announce_new_workers.remote()

    def serving(self) -> list[int]:
        """Ranks of the other workers that have the newest weights."""
        return list(self._rollout_workers.serving())

    def where(self) -> str:
        """Where its training thread is, for people."""
        return f"in step {self._entered.result().step + 1}, phase '{self._recorder.result().phases.now}'"

    def note(self, kind: str, message: str) -> None:
        """Into the run's events, once they are open."""
        self._recorder.result().note(kind, message)

    def write_stacks(self, path: Path) -> None:
        """Append the stacks of all threads of this process."""
        write_stacks(path)

    def validate(self, step: int, part: int, num_parts: int) -> ValidationResults:
        """See `ValidationRunner`."""
        return self._entered.result().validation.validate_part(step, part, num_parts)

    def _ports(self, recorder: Recorder, sends: bool) -> Ports:
        place, waits, among = self._place, recorder.waits, self._among
        awaits = not place.dp_group and "rollout" in self._spec.plan.ranks[place.rank].engines
        ready = self._arrivals.ready if awaits else None
        queue = RaySampleQueue(self._coordinator, place.generator, place.first, waits, self._stop, ready)
        if not place.dp_group:
            return Ports(queue, None, self._arrivals, among.dp_group, among.data, among.everyone, self._abort)
        own: WeightPort = LocalWeights(waits) if among.mesh is None else StreamedWeights(waits)
        exchange = RayReshard(self._exchange, waits) if self._exchange is not None else None
        ports = Ports(queue, None, own, among.dp_group, among.data, among.everyone, self._abort, reshard=exchange)
        if not (place.leads and sends):
            return ports
        fleet = Fleet(self._rollout_workers, carrier_of(self._spec), self._spec.options.engine_timeout_s, waits)
        return replace(ports, weights=RayWeights(own, fleet), validate=self._rollout_workers.validate)

    @contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Report a failure before this worker exits and cancels its work, so that others stop waiting."""
        try:
            yield
        except RuntimeError as err:
            if _OTHERS_ARE_LATE in str(err):  # not reported to them: the driver finds out which one it is
                raise PeersLate(f"worker {self._place.rank} timed out waiting for the others: {err}") from err
            self._fail(err)
            raise
        except BaseException as err:
            self._fail(err)
            raise

    def _abort(self, error: BaseException) -> None:
        """The rollout loop here has ended. A worker that cancels it is exiting, and has reported why if it failed."""
        if not isinstance(error, CancelledError):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        shorten(error)
        self._coordinator.fail.remote(error)
        if self._exchange is not None:
            self._exchange.fail.remote(error)

    def _note_end(self, recorder: Recorder, total_steps: int) -> None:
        progress: Progress = reply(self._coordinator.progress.remote())
        if progress.finished and not self._stop.wanted:
            note_early_end(recorder, progress.group_counts, progress.version.step, total_steps)
        recorder.status = "stopped" if self._stop.wanted and not progress.finished else "finished"
