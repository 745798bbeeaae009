"""The local launcher: a whole run in this process, resumed if its folder has a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from distflow.data.batch import Batch
from distflow.launch import run_end, run_start
from distflow.launch.build_worker import build_worker
from distflow.launch.select_pipeline import for_own_loop
from distflow.observe.report.build import write_report
from distflow.observe.writing.timing import Waits
from distflow.runtime import fault_injection
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.checkpoint.restore import (
    check_same_facts,
    load_queued,
    restore,
    set_generators,
)
from distflow.runtime.resources import Resources, build_resources
from distflow.runtime.run_recorder import Recorder, reported
from distflow.runtime.sample_queue.local import LocalSampleQueue
from distflow.runtime.sample_queue.protocol import FinishedGroup
from distflow.runtime.spec import LAUNCH_DEFAULTS, LaunchOptions, Outcome, Spec
from distflow.runtime.stop_signals import StopRequest
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.runtime.worker import Worker
from distflow.runtime.worker_inputs import Ports, WorkerInputs
from distflow.scheduling.coordinator import Coordinator
from distflow.training.engine import OneRank

LASTING_S = 5.0


def launch_local(spec: Spec, options: LaunchOptions = LAUNCH_DEFAULTS) -> Outcome:
    """See `Launch`."""
    with run_start.starting(spec, options.allow_change) as start:
        built = _build(spec, start, options.say)
        if done := run_end.done_before(spec, start, options.say):
            return done

        def make_stop(recorder: Recorder) -> StopRequest:
            return StopRequest(
                lambda name: _note_stop(name, spec, recorder), ends_process=not options.embedded
            )

        with _running(built, options.callbacks, make_stop) as running:
            steps = running.worker.training_loop()
        return run_end.outcome_of(
            spec, steps, running.stop.signal, running.recorder.status == "stopped"
        )


@contextmanager
def open_local(
    spec: Spec, allow_change: tuple[str, ...], say: Callable[[str], None]
) -> Iterator["Running"]:
    """The run, driven by the caller instead of `Worker.training_loop`. Signals are left to the
    caller."""
    never = nullcontext(StopRequest(lambda name: None))
    with run_start.starting(spec, allow_change) as start:
        with _running(
            _build(spec, start, say), Callbacks(), lambda recorder: never, own_loop=True
        ) as running:
            yield running
        write_report(spec.run_dir)


@dataclass(frozen=True)
class Running:
    worker: Worker
    ports: Ports
    recorder: Recorder
    stop: StopRequest

    @property
    def intake(self) -> LocalSampleQueue:
        assert isinstance(self.ports.queue, LocalSampleQueue), "the queue is of this process"
        return self.ports.queue


@dataclass(frozen=True)
class _Built:
    """A run with its engines and services."""

    spec: Spec
    start: run_start.Start
    resources: Resources
    differences: list[str]
    """Harmless ones from the checkpoint."""
    say: Callable[[str], None]


def _build(spec: Spec, start: run_start.Start, say: Callable[[str], None]) -> _Built:
    """Raises UserError if the checkpoint is of another model, tokenizer or data."""
    fault_injection.arm(0)
    resources = build_resources(spec.factories, spec.plan.ranks[0], say=say)
    for line in run_start.model_lines(spec, resources.sizes):
        say(line)
    facts = {**spec.facts, **resources.facts}

    if start.checkpoint:
        differences = check_same_facts(start.checkpoint, spec, facts)
    else:
        differences = []

    return _Built(spec, start, resources, differences, say)


@contextmanager
def _running(
    built: _Built,
    callbacks: Callbacks,
    make_stop: Callable[[Recorder], AbstractContextManager[StopRequest]],
    own_loop: bool = False,
) -> Iterator[Running]:
    """Enters the worker, and records the end on exit. own_loop: no rows of the data set are needed
    yet."""
    spec = built.spec
    start = built.start
    resources = built.resources
    checkpoint = built.start.checkpoint
    start.set_aside(spec, built.say)
    state = restore(checkpoint, resources) if checkpoint else {}
    queued = load_queued(checkpoint) if checkpoint else {}
    coordinator, ledger = run_start.begin_ledger(spec, start)

    total_steps = coordinator.plan.total_steps
    with (
        reported(spec.run_dir, built.say),
        Recorder(spec, total_steps, ledger.restart, start.resumed_at, callbacks) as recorder,
        ledger,
        make_stop(recorder) as stop,
    ):
        with recorder.phases("start"):
            run_start.write_facts(spec, resources.facts, recorder, total_steps)
            if checkpoint:
                run_start.note_resume(recorder, checkpoint, built.differences)
            ports = local_ports(coordinator, recorder.waits, queued)

            if own_loop:
                assert isinstance(ports.queue, LocalSampleQueue), "the queue is of this process"
                coordinator.prompt_groups.data_open = False
                spec = for_own_loop(spec, ports.queue.submissions)

            version = coordinator.version
            store = start.store
            worker = build_worker(
                WorkerInputs(
                    spec, 0, resources, ports, recorder, store, stop, state, version, checkpoint
                )
            )

        with worker:
            set_generators(checkpoint, spec.config.trainer.seed)
            yield Running(worker, ports, recorder, stop)

        counts = coordinator.checked_counts()
        planned = coordinator.plan.total_steps
        run_end.note_end(recorder, stop, coordinator.finished, counts, coordinator.step, planned)


def local_ports(
    coordinator: Coordinator,
    waits: Waits,
    queued: Mapping[int, FinishedGroup[Batch]] | None = None,
) -> Ports:
    """Ports for workers of this process."""
    queue = LocalSampleQueue(coordinator, waits, queued=queued)
    weights = LocalWeights(waits)
    return Ports(queue, weights, weights, OneRank(), OneRank(), OneRank(), queue.fail)


def _note_stop(name: str, spec: Spec, recorder: Recorder) -> None:
    """Report the first signal, what follows, and what the run waits for if that takes long. name:
    of the signal."""
    saving = "not saving (trainer.save_freq is off)"
    if spec.data.saves:
        saving = "saving"

    waits = reversed(recorder.waits.now())

    # the training loop continues by itself
    longest = {wait.who: wait for wait in waits if wait.on != "training"}
    lasting = [f"; {wait}" for wait in longest.values() if wait.seconds() >= LASTING_S]
    message = (
        f"finishing this step, {saving}, then exiting; a second signal exits at "
        f"once{''.join(lasting)}"
    )
    recorder.note("info", f"{name}: {message}")
