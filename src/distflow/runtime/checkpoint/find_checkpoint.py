"""Finds where a run begins: at its start, after a checkpoint, or not at all because it is done; and
the checkpoint whose policy a run's folder provides as a model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from distflow.errors import UserError, resume_advice
from distflow.observe.writing.run_folder import EARLIER, MARK
from distflow.runtime.checkpoint.checkpoint_store import Checkpoint, CheckpointStore
from distflow.runtime.checkpoint.files import MANIFEST, by_age, checkpoints_in
from distflow.runtime.spec import Spec
from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.ledger import ledger_id
from distflow.scheduling.scheduler_snapshot import Snapshot

CHECKPOINTS = "checkpoints"
LEDGER = "ledger.jsonl"

_WANTED = (
    "name a run's folder (runs/PROJECT/EXPERIMENT) or one of its checkpoints "
    "(.../checkpoints/step-000010)"
)


def find_checkpoint(store: CheckpointStore, mode: str) -> Checkpoint | None:
    """The checkpoint to resume from. store: of the run's folder. mode: `trainer.resume_mode`.
    Raises CheckpointError."""
    if mode == "never":
        return None
    if mode == "auto":
        return store.load() if store.exists() else None
    path = Path(mode).expanduser()
    return store.load(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)


def resumes_here(checkpoint: Checkpoint | None, mode: str, run_dir: Path) -> bool:
    """Whether the folder's records of earlier starts belong to this run."""
    if mode == "auto":
        return True
    if checkpoint is None:
        return False

    mark = mark_of(_snapshot(checkpoint))
    is_copy = mark is not None and mark.ledger == ledger_id(run_dir / LEDGER)
    return is_copy or checkpoint.path.resolve().is_relative_to((run_dir / CHECKPOINTS).resolve())


def is_done(checkpoint: Checkpoint, spec: Spec) -> bool:
    """Whether no steps of the run are left after a checkpoint. Raises CheckpointError if it cannot
    be resumed from."""
    snapshot = _snapshot(checkpoint)
    with checkpoint.reading():
        return Coordinator(remaining_plan(spec.data, snapshot), None, snapshot).finished


def remaining_plan(plan: DataPlan, snapshot: Snapshot) -> DataPlan:
    """The plan after a snapshot. If epochs were raised after a step that was short because the data
    had ended, one more step is needed."""
    if plan.total_groups is None:
        return plan
    drawn = snapshot["issued"] - snapshot.get("offered", 0)
    prompt_groups = max(plan.total_groups - drawn, 0) + len(snapshot["live"])
    return replace(plan, total_steps=snapshot["step"] + -(-prompt_groups // plan.consumer_batch))


def done_message(checkpoint: Checkpoint, spec: Spec, resumes: bool) -> str:
    """The message about a finished run. resumes: whether it is the folder's own; raises UserError
    if not."""
    by_steps = spec.data.total_groups is None
    if by_steps:
        longer = f"trainer.total_training_steps={2 * checkpoint.step}"
    else:
        longer = f"trainer.total_epochs={2 * spec.config.trainer.total_epochs}"

    ended = _snapshot(checkpoint).get("ended", {})
    why = ""
    if ended.get("when") == str(spec.data.stop_when):
        why = f" ({ended['why']})"

    longer = "trainer.stop_when=null" if why else longer
    if resumes and by_steps and spec.data.total_steps < checkpoint.step:
        why += f", which is more than trainer.total_training_steps={spec.data.total_steps}"
    ways = as_list({"to continue": longer, **ways_to_start(spec)})

    if not resumes:
        raise UserError(
            f"{checkpoint.path} is the end of its run, and nothing is left to do.\n{ways}"
        )

    return (
        f"{spec.run_dir} is finished: step {checkpoint.step} was the last{why}. Nothing is trained "
        f"again.\n{ways}"
    )


def ways_to_start(spec: Spec) -> dict[str, str]:
    """Options for a run's folder that is in use, by their effect."""
    beside = "trainer.default_local_dir=FOLDER"
    if spec.config.trainer.default_local_dir is None:
        beside = "trainer.experiment_name=NAME"
    anew = f"{resume_advice('never')} (existing files are moved to {spec.run_dir / EARLIER})"
    return {"to run beside it": beside, "to start anew": anew}


def as_list(ways: Mapping[str, str]) -> str:
    """Lines such as ` to start anew: --resume never`."""
    width = max(map(len, ways)) + 2
    return "\n".join(f"  {f'{what}:':<{width}}{how}" for what, how in ways.items())


def _snapshot(checkpoint: Checkpoint) -> Snapshot:
    with checkpoint.reading():
        snapshot: Snapshot = checkpoint.load("run")["coordinator"]
        mark_of(snapshot)
        return snapshot


def is_of_a_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run, of its checkpoints or of one of them, rather than of a
    model."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return False

    marks = (MARK, CHECKPOINTS, MANIFEST)
    is_checkpoint = folder.resolve() in checkpoints_in(folder.resolve().parent)
    return (
        any((folder / mark).exists() for mark in marks)
        or bool(checkpoints_in(folder))
        or is_checkpoint
    )


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run's folder, not verified."""
    return next(reversed(by_age(run_dir / CHECKPOINTS)), None)


def policy_checkpoint(source: Path) -> Checkpoint:
    """The newest complete checkpoint of a run's folder, or the specified one. Raises UserError if
    there is none."""
    folder = source.expanduser()
    if not folder.exists():
        raise UserError(f"there is no folder {source}: {_WANTED}")
    if not is_of_a_run(folder):
        raise UserError(f"{source} is neither a run's folder nor a checkpoint: {_WANTED}")

    store = folder
    if (folder / CHECKPOINTS).is_dir():
        store = folder / CHECKPOINTS

    if (folder / MARK).exists() and not checkpoints_in(store):
        raise UserError(
            f"the run {source} has saved no checkpoint: set trainer.save_freq, and train it again. "
            "For an evaluation, name the model or run that it evaluated"
        )

    return CheckpointStore(store).load(folder if (folder / MANIFEST).is_file() else None)
