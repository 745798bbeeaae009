"""The local launcher: a whole run in this process, resumed where its folder holds a checkpoint."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from distflow import __version__
from distflow.flow.coordinator import Coordinator, mark_of
from distflow.flow.ledger import Ledger
from distflow.flow.snapshot import Snapshot
from distflow.observe.claim import claimed
from distflow.observe.earlier import finish_moving, set_aside
from distflow.observe.files import remove_asides
from distflow.observe.report import write_report
from distflow.observe.report_summary import find_accuracy
from distflow.observe.run_reader import read_damage, read_metrics
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.checkpoint import Checkpoint, CheckpointStore
from distflow.runtime.disk import writing_to
from distflow.runtime.ports import Ports
from distflow.runtime.ports.edge import Live
from distflow.runtime.ports.local_edge import LocalEdge
from distflow.runtime.ports.local_weights import LocalWeights
from distflow.runtime.recorder import Recorder, reported
from distflow.runtime.resources import Resources, build_resources
from distflow.runtime.resume import (
    CHECKPOINTS,
    LEDGER,
    find_checkpoint,
    goes_on_here,
    is_done,
    remaining,
    told_done,
)
from distflow.runtime.saved import check_same_config, check_same_facts, restore, set_generators
from distflow.runtime.spec import Outcome, Spec
from distflow.runtime.stop import StopRequest
from distflow.runtime.waits import Waits
from distflow.runtime.worker import Worker
from distflow.training.collective import OneRank

LASTING_S = 5.0
_FROM_THE_START = -1


def launch_local(
    spec: Spec,
    *,
    allow_change: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008  immutable
    embedded: bool = False,
) -> Outcome:
    """See `Launch`."""
    with writing_to(spec.run_dir), claimed(spec.run_dir):
        keep_best = int(spec.options.keep_best is not None)
        store = CheckpointStore(spec.run_dir / CHECKPOINTS, spec.options.keep_last, keep_best)
        store.remove_leftovers()
        remove_asides(spec.run_dir)
        finish_moving(spec.run_dir)
        mode = spec.options.resume
        checkpoint = find_checkpoint(store, mode)
        if checkpoint:
            check_same_config(checkpoint, spec, allow_change)
        resources = build_resources(spec.factories, spec.plan.ranks[0])
        say(_described(spec, resources))
        facts = {**spec.facts, **resources.facts}
        differences = check_same_facts(checkpoint, spec, facts) if checkpoint else []
        goes_on = goes_on_here(checkpoint, mode, spec.run_dir)
        if checkpoint and is_done(checkpoint, spec):
            say(told_done(checkpoint, spec, goes_on))
            return Outcome(checkpoint.step, None, False, write_report(spec.run_dir), *_accuracy(spec.run_dir))
        if not goes_on and (moved := set_aside(spec.run_dir)):
            say(f"the run that was in {spec.run_dir} is in {moved} now")
        state, live = restore(checkpoint, resources) if checkpoint else ({}, None)
        coordinator, ledger = _begin(spec, checkpoint, allow_change)
        resumed_at = checkpoint.step if checkpoint else _FROM_THE_START
        with (
            reported(spec.run_dir, say),
            Recorder(spec, coordinator.plan.total_steps, ledger.incarnation, resumed_at, callbacks) as recorder,
        ):
            _write_facts(spec, resources.facts, recorder, coordinator.plan.total_steps)
            if checkpoint:
                _note_resume(recorder, checkpoint, differences)
            ports = local_ports(coordinator, recorder.waits, live)

            def asked_to_stop(name: str) -> None:
                recorder.note("info", f"{name}: {_stopping(spec, recorder.waits)}")

            with StopRequest(asked_to_stop, ends_process=not embedded) as stop:
                with Worker(spec, 0, resources, ports, recorder, store, stop, state, coordinator.version) as worker:
                    set_generators(checkpoint, spec.options.seed)
                    steps = worker.learning_loop()
                _note_early_end(recorder, coordinator, stop)
                recorder.status = "stopped" if stop.wanted and not coordinator.finished else "finished"
            ledger.close()
    before, after = _accuracy(spec.run_dir)
    # Written once the recorder is closed: the report also says how the run ended.
    return Outcome(steps, stop.signal, recorder.status == "stopped", recorder.report(), before, after)


def local_ports(coordinator: Coordinator, waits: Waits, live: Live | None = None, num_ranks: int = 1) -> Ports:
    """Ports for workers of this process."""
    edge = LocalEdge(coordinator, waits, num_ranks, live)
    return Ports(edge, LocalWeights(waits), OneRank(), edge.fail)


def _described(spec: Spec, resources: Resources) -> str:
    return f"model: {spec.description['model']}, {resources.num_parameters:,} parameters"


def _note_resume(recorder: Recorder, checkpoint: Checkpoint, differences: list[str]) -> None:
    recorder.note("info", f"resumed from {checkpoint.path.name}")
    for warning in filter(None, [checkpoint.message, *differences, *read_damage(recorder.folder.path)]):
        recorder.note("warning", warning)


def _note_early_end(recorder: Recorder, coordinator: Coordinator, stop: StopRequest) -> None:
    """Groups that were dropped leave their steps to others, and so a run may have fewer than were planned."""
    done, planned = coordinator.step, coordinator.plan.total_steps
    if done < planned and not stop.wanted:
        dropped = ", ".join(f"{n} {reason}" for reason, n in coordinator.accounting().dropped.items())
        recorder.note("info", f"the data ended after {done} of {planned} steps: groups were dropped ({dropped})")


def _stopping(spec: Spec, waits: Waits) -> str:
    """What the first signal leads to, and what the run waits for meanwhile, if that lasts."""
    saving = "saving" if spec.options.save_freq > 0 else "not saving (trainer.save_freq is off)"
    lasting = [f"; {wait}" for wait in waits.now()[:1] if wait.seconds() >= LASTING_S]
    return f"finishing this step, {saving}, then leaving; a second time leaves at once{''.join(lasting)}"


def _begin(spec: Spec, checkpoint: Checkpoint | None, allowed: tuple[str, ...]) -> tuple[Coordinator, Ledger]:
    path = spec.run_dir / LEDGER
    if checkpoint is None:
        ledger = Ledger(path)
        return Coordinator(spec.data, ledger), ledger
    with checkpoint.reading():
        snapshot: Snapshot = checkpoint.load("run")["coordinator"]
        ledger = Ledger(path, mark_of(snapshot))
        coordinator = Coordinator(remaining(spec.data, snapshot), ledger, snapshot)
    if allowed:
        ledger.append("allowed_change", keys=list(allowed))
    return coordinator, ledger


def _write_facts(spec: Spec, model_facts: Mapping[str, object], recorder: Recorder, total_steps: int) -> None:
    facts: Mapping[str, object] = {
        "distflow": __version__,
        "python": platform.python_version(),
        "program": spec.plan.program,
        "total_steps": total_steps,
        **spec.description,
        **spec.facts,
        **model_facts,
    }
    recorder.folder.write_json("run.json", facts)
    recorder.folder.write_text("config.yaml", spec.text)
    recorder.folder.write_json("plan.json", {**spec.plan.to_json(), "nodes": spec.program().to_json()})


def _accuracy(run_dir: Path) -> tuple[float | None, float | None]:
    """The first and last of the whole run, this incarnation's or an earlier one's."""
    found = find_accuracy(read_metrics(run_dir), None)
    if found is None:
        return None, None
    first, last = found.points[0], found.points[-1]
    return first[1] if first[0] == 0 else None, last[1] if last[0] > 0 else None
