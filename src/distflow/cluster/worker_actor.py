"""A worker as an actor, of Ray or of the local launcher: the process that runs its rank's part of
the plan."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distflow import __version__
from distflow.cluster.coordinator_actor import Progress
from distflow.cluster.own_loop_worker import RankCalls, with_submissions
from distflow.cluster.process_groups import Collectives
from distflow.cluster.remote_calls import reply
from distflow.cluster.reports_to_driver import MessageSender, RemoteView, remote_callbacks
from distflow.cluster.weights_to_workers import WeightReceivers
from distflow.cluster.worker_connections import WorkerPorts
from distflow.launch.build_worker import build_worker
from distflow.launch.run_end import note_end
from distflow.launch.run_start import Start, model_lines, note_resume, open_store, write_facts
from distflow.processes.child import keep_exit_statuses
from distflow.runtime import fault_injection
from distflow.runtime.checkpoint.restore import check_same_facts, restore, set_generators
from distflow.runtime.dp_groups import kept_share
from distflow.runtime.resources import ModelSizes, build_resources
from distflow.runtime.rollout_loop.engine_watch import write_stacks
from distflow.runtime.run_recorder import Recorder, ReportingProcess
from distflow.runtime.spec import Spec
from distflow.runtime.worker import Worker
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.runtime.worker_place import Place, own_device


@dataclass(frozen=True)
class BuildReport:
    """The resources of a worker. version: of its distflow. device: name of its device."""

    version: str
    device: str
    facts: dict[str, object]
    sizes: ModelSizes


def check_reports(
    reports: Sequence[BuildReport],
    leader: int,
    spec: Spec,
    start: Start,
    say: Callable[[str], None],
) -> list[str]:
    """Report what all workers have built; returns the harmless differences from the checkpoint.
    leader: the rank that reports for all. Raises UserError if the checkpoint is of another model or
    tokenizer."""
    devices = Counter(report.device for report in reports)
    say(
        f"workers compute on: {', '.join(f'{number} × {name}' for name, number in devices.items())}"
    )
    critic = max(report.sizes.critic for report in reports)  # not every worker trains it
    for line in model_lines(spec, reports[leader].sizes._replace(critic=critic)):
        say(line)
    facts = {**spec.facts, **reports[leader].facts}
    if start.checkpoint:
        return check_same_facts(start.checkpoint, spec, facts)

    return []


class WorkerActor:
    """A worker: `build`, then `run`. Weights arrive meanwhile, on other threads, by `receive` and
    `load` (see `IncomingWeights`)."""

    def __init__(
        self,
        spec: Spec,
        start: Start,
        place: Place,
        coordinator: Any,
        meeting: Path,
    ) -> None:
        """coordinator: the actor's handle. meeting: a file through which training workers find each
        other."""
        keep_exit_statuses()
        start.join(spec)
        place.home.enter()
        fault_injection.arm(place.rank)
        self._spec = spec
        self._start = start
        self._place = place
        self._coordinator = coordinator
        self._meeting = meeting
        self._rollout_workers = WeightReceivers(partial(self.note, "warning"))
        self._ports = WorkerPorts(spec, place, coordinator)
        self._recorder: Future[Recorder] = Future()
        self._worker: Future[Worker] = Future()
        self._calls = RankCalls()

    def build(self) -> BuildReport:
        """Build engines and services. Raises UserError."""
        fault_injection.reach("build")

        # loads the user's modules, and sets threads as in a run of one process
        self._spec.pipeline()
        torch.set_num_threads(self._place.threads)
        own = self._spec.plan.ranks[self._place.rank]
        device = own_device(own.device)  # before meeting the others, which would wait
        self._among = among = Collectives.join(self._spec, self._place, self._meeting)
        self._resources = build_resources(self._spec.factories, own, among.data, among.sharding)

        return BuildReport(__version__, device, dict(self._resources.facts), self._resources.sizes)

    def run(self, differences: list[str], others: Mapping[int, Any], own_loop: bool) -> int:
        """Run this worker's part of the whole run; returns the steps consumed in total.

        differences: from the checkpoint. others: for the leading worker, the workers that only
        generate, by rank. own_loop: a training rank executes what `call` requests.
        """
        if own_loop:
            self._spec = with_submissions(self._spec, self._coordinator)
        spec = self._spec
        place = self._place
        checkpoint = self._start.checkpoint
        progress: Progress = reply(self._coordinator.progress.remote())
        state = restore(checkpoint, self._resources) if checkpoint else {}

        send = MessageSender(self._coordinator)
        with Recorder(
            spec,
            progress.total_steps,
            progress.version.restart,
            self._start.resumed_at,
            remote_callbacks(send, place),
            ReportingProcess(
                place.part,
                speaks=not place.dp_group or place.rank == place.dp_group[0],
                share=kept_share(spec.plan, place.dp_groups, place.rank),
            ),
            RemoteView(send, place),  # type: ignore[arg-type]  # every method of the driver's view
        ) as recorder:
            with recorder.phases("start"):
                if place.leads:
                    write_facts(spec, self._resources.facts, recorder, progress.total_steps)
                    if checkpoint:
                        note_resume(recorder, checkpoint, differences)

                self._recorder.set_result(recorder)
                for rank, other in others.items():
                    self._rollout_workers.join(rank, other)
                ports = self._ports.build(
                    self._among, recorder.waits, self._rollout_workers if others else None
                )
                stop = self._ports.stop
                store = open_store(spec)
                resources = self._resources
                version = progress.version
                worker = build_worker(
                    WorkerInputs(
                        spec,
                        place.rank,
                        resources,
                        ports,
                        recorder,
                        store,
                        stop,
                        state,
                        version,
                        checkpoint,
                    )
                )

            with worker:
                set_generators(checkpoint, spec.config.trainer.seed, place.part)
                self._worker.set_result(worker)

                with self._ports.errors_reported():
                    trains = (
                        partial(self._calls.serve, worker) if own_loop else worker.training_loop
                    )
                    steps = trains() if place.dp_group else worker.serve()

            if place.leads:
                ended: Progress = reply(self._coordinator.progress.remote())
                done = ended.version.step
                planned = ended.total_steps
                note_end(recorder, stop, ended.finished, ended.group_counts, done, planned)

        send.flush()
        return steps

    def call(self, name: str, *arguments: Any) -> Any:
        return self._calls.call(name, *arguments)

    def generate(self, request: Any) -> Any:
        """For the driver's loop: see `Worker.generate`."""
        fault_injection.reach("rollout.generate")
        return self._worker.result().generate(request)

    def receive(self, *bucket: Any) -> None:
        self._ports.incoming_weights.receive(*bucket)

    def load(self, *version: Any) -> Any:
        return self._ports.incoming_weights.load(*version)

    def alive(self) -> None:
        """A heartbeat, answered by a separate thread."""

    def join(self, rank: int, worker: Any) -> None:
        """A rollout worker has started as a replacement."""
        self._rollout_workers.join(rank, worker)
        self._coordinator.announce_new_workers.remote()

    def with_newest_weights(self) -> list[int]:
        return list(self._rollout_workers.with_newest_weights())

    def where(self) -> str:
        """The step and phase of its training thread, in words."""
        return (
            f"in step {self._worker.result().step + 1}, phase "
            f"'{self._recorder.result().phases.now}'"
        )

    def note(self, kind: str, message: str) -> None:
        self._recorder.result().note(kind, message)

    def write_stacks(self, path: Path) -> None:
        write_stacks(path)

    def validate(self, step: int, part: int, num_parts: int) -> Any:
        return self._worker.result().validation.validate_part(step, part, num_parts)
