"""Where a run begins: its folder, the checkpoint that it resumes from, and the files that describe
it."""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from distflow import __version__
from distflow.launch.check_disk import check_disk
from distflow.launch.user_code import remember_own_run
from distflow.observe.crash_safe_files import remove_asides, sync
from distflow.observe.run_reader import VALIDATION_ROWS, read_damage
from distflow.observe.writing.run_folder import claimed, finish_moving, join, set_aside
from distflow.observe.writing.trackers import check_trackers
from distflow.processes.survivors import survivors_ended
from distflow.runtime import fault_injection
from distflow.runtime.checkpoint.checkpoint_store import Checkpoint, CheckpointStore
from distflow.runtime.checkpoint.find_checkpoint import (
    CHECKPOINTS,
    LEDGER,
    find_checkpoint,
    remaining_plan,
    resumes_here,
)
from distflow.runtime.checkpoint.restore import check_same_config, check_same_facts
from distflow.runtime.resources import ModelSizes
from distflow.runtime.run_errors import writing_to
from distflow.runtime.run_recorder import Recorder
from distflow.runtime.spec import Spec
from distflow.runtime.weight_sync.bucket_files import remove_weights
from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.ledger import Ledger
from distflow.scheduling.scheduler_snapshot import Snapshot

FROM_THE_START = -1


@dataclass(frozen=True)
class Start:
    """Where a run begins: after a checkpoint, or at its start."""

    store: CheckpointStore
    checkpoint: Checkpoint | None
    resumes: bool
    """Whether the folder's records belong to it."""
    allowed: tuple[str, ...]
    """Config keys that may differ from the checkpoint."""
    owner: str
    """Of the folder, in words."""

    @property
    def resumed_at(self) -> int:
        if self.checkpoint:
            return self.checkpoint.step
        return FROM_THE_START

    def join(self, spec: Spec) -> None:
        """Call before another process writes to the folder."""
        join(spec.run_dir, self.owner)

    def set_aside(self, spec: Spec, say: Callable[[str], None]) -> None:
        """Move another run's files in the folder out of the way."""
        if not self.resumes and (moved := set_aside(spec.run_dir)):
            say(f"the previous run in {spec.run_dir} was moved to {moved}")


@contextmanager
def starting(spec: Spec, allow_change: tuple[str, ...]) -> Iterator[Start]:
    """Claims the run's folder for this process and finds where the run begins. Raises UserError for
    a checkpoint of another config or other data, an engine that cannot train, a tracker that is not
    installed, or a disk that is too small for its checkpoints."""
    check_trackers(spec.config.trainer.logger)
    check_disk(spec)
    with writing_to(spec.run_dir), claimed(spec.run_dir) as owner, survivors_ended():
        yield find_start(spec, spec.config.trainer.resume_mode, allow_change, owner)


def find_start(spec: Spec, mode: str, allow_change: tuple[str, ...], owner: str) -> Start:
    """Where the run begins, for the owner of its folder. mode: as `trainer.resume_mode`. Raises
    UserError."""
    store = open_store(spec)
    store.remove_leftovers()
    remove_asides(spec.run_dir)
    remove_weights(spec.run_dir)
    finish_moving(spec.run_dir)
    checkpoint = find_checkpoint(store, mode)
    resumes = resumes_here(checkpoint, mode, spec.run_dir)

    if checkpoint:
        check_same_config(checkpoint, spec, allow_change)
        check_same_facts(checkpoint, spec, spec.facts)

    return Start(store, checkpoint, resumes, allow_change, owner)


def open_store(spec: Spec) -> CheckpointStore:
    keep_best = int(spec.keep_best is not None)
    return CheckpointStore(
        spec.run_dir / CHECKPOINTS, spec.keep_last, keep_best, on_point=_reach_in_checkpoint
    )


def _reach_in_checkpoint(point: str) -> None:
    fault_injection.reach(f"checkpoint.{point}")


def model_lines(spec: Spec, sizes: ModelSizes) -> list[str]:
    """Lines on the run's models, and which parts of them are trained."""
    config = spec.config
    model = config.actor_rollout_ref.model
    line = f"model: {spec.description['model']}, {sizes.policy:,} parameters"
    if model.init == "random":
        line += " of random values (init=random)"

    if model.lora_rank:
        line += (
            f"; LoRA of rank {model.lora_rank} trains {sizes.trained:,} of them "
            f"({sizes.trained / sizes.policy:.2%})"
        )

    lines = [line]
    if sizes.critic:
        optim = config.critic.optim
        name = config.critic.model.path or spec.description["model"]
        lines.append(
            f"critic: {name}, {sizes.critic:,} parameters; {optim.optimizer}, learning rate "
            f"{optim.lr:g}"
        )

    return lines


def note_resume(recorder: Recorder, checkpoint: Checkpoint, differences: list[str]) -> None:
    """Report the checkpoint that the run resumes from, and what differs."""
    recorder.note("info", f"resumed from {checkpoint.path.name}")
    for warning in (checkpoint.message, *differences, *read_damage(recorder.folder.path)):
        if warning:
            recorder.note("warning", warning)


def begin_ledger(spec: Spec, start: Start) -> tuple[Coordinator, Ledger]:
    """The coordinator and its ledger, at the checkpoint's state."""
    path = spec.run_dir / LEDGER
    checkpoint = start.checkpoint
    if checkpoint is None:
        ledger = Ledger(path)
        sync(path.parent)
        return Coordinator(spec.data, ledger), ledger

    with checkpoint.reading():
        snapshot: Snapshot = checkpoint.load("run")["coordinator"]
        ledger = Ledger(path, mark_of(snapshot))
        sync(path.parent)
        coordinator = Coordinator(remaining_plan(spec.data, snapshot), ledger, snapshot)

    if start.allowed:
        ledger.append("allowed_change", keys=list(start.allowed))
    return coordinator, ledger


def write_facts(
    spec: Spec, model_facts: Mapping[str, object], recorder: Recorder, total_steps: int
) -> None:
    """Write the files that describe the run as a whole."""
    facts: dict[str, object] = {
        "distflow": __version__,
        "python": platform.python_version(),
        "pipeline": spec.plan.pipeline,
        "total_steps": total_steps,
    }
    if len(spec.plan.ranks) > 1:
        facts["workers"] = spec.plan.placed()
    facts |= {**spec.description, **spec.facts, **model_facts}
    recorder.folder.write_json("run.json", facts)
    remember_own_run(spec.config)
    rows = spec.facts.get(VALIDATION_ROWS)
    recorder.folder.event(
        VALIDATION_ROWS, f"validation rows: {rows or 'none'}", **{VALIDATION_ROWS: rows}
    )
    for warning in spec.warnings:
        recorder.folder.event("warning", warning)
    recorder.folder.write_text("config.yaml", spec.text)
    recorder.folder.write_json(
        "plan.json",
        {**asdict(spec.plan), "nodes": spec.pipeline().to_json(), "predicted": spec.predicted},
    )
