"""A worker as an actor: a process that runs its rank's part of the plan."""

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
from distflow.cluster.coordinator_actor import Standing
from distflow.cluster.failures import PeersLate
from distflow.cluster.log_forwarding import RemoteView, Teller, remote_callbacks
from distflow.cluster.object_store import reply, shorten
from distflow.cluster.process_groups import Collectives
from distflow.cluster.reshard import RayReshard
from distflow.cluster.reward_actors import pools_of
from distflow.cluster.rollout_workers import Members
from distflow.cluster.sample_queue import AgreedStop, RaySampleQueue
from distflow.cluster.weight_sync import Fleet, RayWeights, carrier_of
from distflow.launch.build_worker import build_worker
from distflow.observe.writing.terminal import TerminalView
from distflow.rewards.pool.prestart import take_pool
from distflow.rollout.engine import Receipt
from distflow.runtime import fault_injection
from distflow.runtime.checkpoint.state import restore, set_generators
from distflow.runtime.engine_watch import write_stacks
from distflow.runtime.rank_info import Place, kept_share
from distflow.runtime.recorder import Recorder
from distflow.runtime.resources import build_resources
from distflow.runtime.run_setup import Start, note_early_end, note_resume, open_store, write_facts
from distflow.runtime.spec import Spec
from distflow.runtime.user_calls.sync_calls import Callbacks
from distflow.runtime.validation import ValidationResults
from distflow.runtime.weight_sync.buckets import Sent
from distflow.runtime.weight_sync.protocol import LocalWeights, WeightPort
from distflow.runtime.weight_sync.receiver import Arrivals
from distflow.runtime.weight_sync.streamed import StreamedWeights
from distflow.runtime.worker import Worker
from distflow.runtime.worker_inputs import Ports, WorkerInputs
from distflow.scheduling.groups import Version

_OTHERS_ARE_LATE = "Timed out waiting"  # gloo's words


@dataclass(frozen=True)
class Built:
    """What the resources of a worker turned out to be. version: of its distflow."""

    version: str
    facts: dict[str, object]
    num_parameters: int


class WorkerActor:
    """`build`, then `run`; what weights come meanwhile, on threads of their own."""

    def __init__(
        self,
        spec: Spec,
        place: Place,
        coordinator: Any,
        meeting: Path,
        exchange: Any = None,
        judges: Sequence[Any] = (),
    ) -> None:
        """coordinator, exchange, judges: handles of their actors; no exchange where nothing goes from team to team, no
        judges where verifiers run beside the worker. meeting: a file over which those that learn find each other."""
        os.umask(0o077)
        place.home.enter()
        fault_injection.arm(place.rank)
        self._spec, self._place, self._coordinator, self._meeting = spec, place, coordinator, meeting
        self._exchange, self._judges = exchange, judges
        self._stop, self._arrivals = AgreedStop(), Arrivals()
        self._members = Members(partial(self.note, "warning"))
        self._recorder: Future[Recorder] = Future()
        self._entered: Future[Worker] = Future()

    def build(self) -> Built:
        """Engines and services. Raises UserError."""
        fault_injection.reach("build")
        try:
            self._spec.pipeline()  # which loads the modules of the user, and sets threads as if this were all of a run
            torch.set_num_threads(self._place.threads)
            self._among = among = Collectives.joined(self._spec, self._place, self._meeting)
            own = self._spec.plan.ranks[self._place.rank]
            start_pool = pools_of(self._judges) if self._judges else take_pool
            self._resources = build_resources(self._spec.factories, own, among.data, among.mesh, start_pool)
        except BaseException as err:
            shorten(err)
            raise
        return Built(__version__, dict(self._resources.facts), self._resources.num_parameters)

    def run(self, start: Start, differences: list[str], others: Mapping[int, Any]) -> int:
        """The whole run, as far as this worker has a part in it; the steps consumed in all.

        differences: from the checkpoint. others: the workers that generate and do not learn, by rank, for the one that
        leads.
        """
        spec, place = self._spec, self._place
        standing: Standing = reply(self._coordinator.standing.remote())
        state = restore(start.checkpoint, self._resources)[0] if start.checkpoint else {}
        tell = Teller(self._coordinator)
        with Recorder(
            spec,
            standing.total_steps,
            standing.restart,
            start.resumed_at,
            remote_callbacks(tell) if place.leads else Callbacks(),
            part=place.part,
            view=cast(TerminalView, RemoteView(tell, place)),
            speaks=not place.dp_group or place.rank == place.dp_group[0],
            share=kept_share(spec.plan, place.dp_groups, place.rank),
        ) as recorder:
            with recorder.phases("start"):
                if place.leads:
                    write_facts(spec, self._resources.facts, recorder, standing.total_steps)
                    if start.checkpoint:
                        note_resume(recorder, start.checkpoint, differences)
                self._recorder.set_result(recorder)
                for rank, worker in others.items():
                    self._members.join(rank, worker)
                ports = self._ports(recorder, sends=bool(others))
                stop, version, store = self._stop, standing.version, open_store(spec)
                entered = build_worker(
                    WorkerInputs(spec, place.rank, self._resources, ports, recorder, store, stop, state, version)
                )
            with entered:
                set_generators(start.checkpoint, spec.options.seed, place.part)
                self._entered.set_result(entered)
                with self._telling_failure():
                    steps = entered.training_loop() if place.dp_group else entered.serve()
            if place.leads:
                self._note_end(recorder, standing.total_steps)
        tell.end()
        return steps

    def take(self, version: Version, number: int, sent: Sent, wanted: str) -> str | None:
        """See `Arrivals`."""
        return self._arrivals.take(version, number, sent, wanted)

    def serve(self, version: Version, num_buckets: int | None) -> Receipt:
        """See `Arrivals`."""
        return self._arrivals.serve(version, num_buckets)

    def alive(self) -> None:
        """Answered on a thread of its own, whatever the others are at."""

    def join(self, rank: int, worker: Any) -> None:
        """A worker that generates has come in place of one that is gone."""
        self._members.join(rank, worker)
        self._coordinator.tell_of_new_workers.remote()

    def serving(self) -> list[int]:
        """Ranks of the other workers that serve the newest weights."""
        return list(self._members.serving())

    def where(self) -> str:
        """What its learning thread is at, for people."""
        return f"in step {self._entered.result().step + 1}, phase '{self._recorder.result().phases.now}'"

    def note(self, kind: str, message: str) -> None:
        """Into the run's events, once they are open."""
        self._recorder.result().note(kind, message)

    def write_stacks(self, path: Path) -> None:
        """Append what all threads of this process are at."""
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
        fleet = Fleet(self._members, carrier_of(self._spec), self._spec.options.engine_timeout_s, waits)
        return replace(ports, weights=RayWeights(own, fleet), validate=self._members.validate)

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        """Before this worker leaves, and so cancels what it has begun: others then wait no more."""
        try:
            yield
        except RuntimeError as err:
            if _OTHERS_ARE_LATE in str(err):  # not told to them: the driver finds out who of them it is
                raise PeersLate(f"worker {self._place.rank} has waited for the others in vain: {err}") from err
            self._fail(err)
            raise
        except BaseException as err:
            self._fail(err)
            raise

    def _abort(self, error: BaseException) -> None:
        """What generates here has ended. A worker that cancels it is leaving, and had told why if it failed."""
        if not isinstance(error, CancelledError):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        shorten(error)
        self._coordinator.fail.remote(error)
        if self._exchange is not None:
            self._exchange.fail.remote(error)

    def _note_end(self, recorder: Recorder, total_steps: int) -> None:
        standing: Standing = reply(self._coordinator.standing.remote())
        if standing.finished and not self._stop.wanted:
            note_early_end(recorder, standing.group_counts, standing.version.step, total_steps)
        recorder.status = "stopped" if self._stop.wanted and not standing.finished else "finished"
