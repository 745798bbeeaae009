"""The local launcher: a whole run in this process, resumed where its folder holds a checkpoint."""

import errno
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow import __version__
from distflow.config.errors import UserError
from distflow.flow.coordinator import Coordinator, mark_of
from distflow.flow.data_plan import DataPlan
from distflow.flow.ledger import Ledger
from distflow.observe.report_summary import find_accuracy
from distflow.observe.run_folder import claimed
from distflow.observe.run_reader import read_metrics
from distflow.runtime.checkpoint import Checkpoint, CheckpointStore
from distflow.runtime.checks.live import LiveChecks
from distflow.runtime.checks.movement import LossTerms, Movement
from distflow.runtime.checks.nonfinite import NonFinite
from distflow.runtime.parts import Parts
from distflow.runtime.recorder import Recorder
from distflow.runtime.saved import NodeState, check_same_run, restore_engines
from distflow.runtime.stop import StopRequest
from distflow.runtime.worker import Worker

CHECKPOINTS = "checkpoints"
_FROM_THE_START = -1
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@dataclass(frozen=True)
class Outcome:
    """steps: consumed in all. stopped: by a signal, before the end. report: the run's report.

    accuracy_before, accuracy_after: on held-out problems, before the first step and at the end, where measured.
    """

    steps: int
    stopped: bool
    report: Path
    accuracy_before: float | None
    accuracy_after: float | None


def launch_local(parts: Parts, *, resume: str = "auto", allow_change: tuple[str, ...] = ()) -> Outcome:
    """Run to the end, or to the first signal.

    resume: "auto" (from the run's last whole checkpoint, if any), "never", or the folder of a checkpoint or a run.
    allow_change: config keys that may differ from the checkpoint's.
    Raises UserError for a checkpoint that does not fit, for a folder that another run uses or that cannot be written;
    TrustError where a check fails; NoProgress, NodeError.
    """
    with _writing_to(parts.run_dir), claimed(parts.run_dir):
        return _launch(parts, resume, allow_change)


def _launch(parts: Parts, resume: str, allow_change: tuple[str, ...]) -> Outcome:
    config, store = parts.config, _store(parts)
    store.remove_leftovers()
    checkpoint = _find_checkpoint(store, resume)
    differences = check_same_run(checkpoint, parts, allow_change) if checkpoint else []
    coordinator, ledger, node_state = _begin(parts, checkpoint)
    if allow_change and checkpoint:
        ledger.append("allowed_change", keys=list(allow_change))
    total = coordinator.plan.total_steps
    resumed_at = checkpoint.step if checkpoint else _FROM_THE_START
    with Recorder(config, parts.run_dir, total, ledger.incarnation, resumed_at) as recorder:
        _write_facts(parts, recorder, total)
        if checkpoint:
            _note_resume(recorder, checkpoint, differences)
        with StopRequest(lambda name: recorder.note("info", f"{name}: {_stopping(parts)}")) as stop:
            checks = _checks(parts, recorder)
            Worker(parts, coordinator, ledger, recorder, checks, store, stop, node_state).run()
            recorder.status = "stopped" if stop.wanted and not coordinator.finished else "finished"
        ledger.close()
    before, after = _accuracy(parts.run_dir)
    # Written once the recorder is closed: the report also says how the run ended.
    return Outcome(coordinator.step, recorder.status == "stopped", recorder.report(), before, after)


@contextmanager
def _writing_to(run_dir: Path) -> Iterator[None]:
    """A disk that is full or refuses is the user's to mend; what was written before it is whole."""
    try:
        yield
    except OSError as err:
        if err.errno not in _DISK:
            raise
        what = f"{err.strerror}: {err.filename}" if err.filename else str(err.strerror)
        raise UserError(
            f"the run's folder {run_dir} cannot be written ({what}). Checkpoints that it holds are whole. Free space, "
            "or set trainer.default_local_dir to another folder; then start again"
        ) from err


def _note_resume(recorder: Recorder, checkpoint: Checkpoint, differences: list[str]) -> None:
    recorder.note("info", f"resumed from {checkpoint.path.name}")
    for warning in filter(None, [checkpoint.message, *differences]):
        recorder.note("warning", warning)


def _stopping(parts: Parts) -> str:
    saving = "saving" if parts.config.trainer.save_freq > 0 else "not saving (trainer.save_freq is off)"
    return f"finishing this step, {saving}, then leaving; a second time leaves at once"


def _store(parts: Parts) -> CheckpointStore:
    trainer = parts.config.trainer
    return CheckpointStore(parts.run_dir / CHECKPOINTS, trainer.keep_last, int(trainer.keep_best))


def _find_checkpoint(store: CheckpointStore, resume: str) -> Checkpoint | None:
    if resume == "never":
        return None
    if resume == "auto":
        return store.load() if store.exists() else None
    path = Path(resume)
    return store.load(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)


def _begin(parts: Parts, checkpoint: Checkpoint | None) -> tuple[Coordinator, Ledger, NodeState]:
    path = parts.run_dir / "ledger.jsonl"
    if checkpoint is None:
        ledger = Ledger(path)
        return Coordinator(parts.plan, ledger), ledger, {}
    node_state = restore_engines(checkpoint, parts)
    snapshot = checkpoint.load("run")["coordinator"]
    ledger = Ledger(path, mark_of(snapshot))
    return Coordinator(_remaining(parts.plan, snapshot), ledger, snapshot), ledger, node_state


def _remaining(plan: DataPlan, snapshot: Mapping[str, Any]) -> DataPlan:
    """Epochs that were raised go on behind a step that was short because they had ended: that takes a step more."""
    if plan.total_tickets is None:
        return plan
    tickets = max(plan.total_tickets - snapshot["issued"], 0) + len(snapshot["live"])
    return replace(plan, total_steps=snapshot["step"] + -(-tickets // plan.consumer_batch))


def _checks(parts: Parts, recorder: Recorder) -> LiveChecks:
    trust = parts.config.trust
    return LiveChecks(
        recorder.note,
        parts.tolerance,
        parts.ratio_limit,
        NonFinite(parts.run_dir / "bundles", trust.max_skipped_updates, parts.config_yaml),
        {role: Movement(trust.unmoved_after) for role in parts.engines.trained()},
        LossTerms(parts.loss_terms),
    )


def _write_facts(parts: Parts, recorder: Recorder, total_steps: int) -> None:
    facts: Mapping[str, Any] = {
        "distflow": __version__,
        "python": platform.python_version(),
        "program": parts.program.graph_id,
        "total_steps": total_steps,
        **parts.description,
        **parts.facts,
    }
    recorder.folder.write_json("run.json", facts)
    recorder.folder.write_text("config.yaml", parts.config_yaml)
    recorder.folder.write_json("plan.json", parts.placement)


def _accuracy(run_dir: Path) -> tuple[float | None, float | None]:
    """The first and last of the whole run, this incarnation's or an earlier one's."""
    found = find_accuracy(read_metrics(run_dir), None)
    if found is None:
        return None, None
    first, last = found.points[0], found.points[-1]
    return first[1] if first[0] == 0 else None, last[1] if last[0] > 0 else None
