"""A run's folder, or a checkpoint's, where a model is wanted: which checkpoint's policy that is."""

from pathlib import Path

from distflow.config.errors import UserError
from distflow.observe.claim import MARK
from distflow.runtime.checkpoint import Checkpoint, CheckpointStore
from distflow.runtime.checkpoint_files import MANIFEST, read_manifest
from distflow.runtime.checkpoint_folder import by_age, checkpoints_in
from distflow.runtime.resume import CHECKPOINTS


def is_of_a_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run, of its checkpoints or of one of them, and no model's."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return False
    marks = (MARK, CHECKPOINTS, MANIFEST)
    is_checkpoint = folder.resolve() in checkpoints_in(folder.resolve().parent)
    return any((folder / mark).exists() for mark in marks) or bool(checkpoints_in(folder)) or is_checkpoint


def policy_checkpoint(source: Path) -> Checkpoint:
    """The newest whole checkpoint of a run's folder, or the one that is named. Raises UserError where there is none."""
    folder = source.expanduser()
    if not folder.exists():
        raise UserError(f"there is no folder {source}: {_WANTED}")
    if not is_of_a_run(folder):
        raise UserError(f"{source} is no run's folder and no checkpoint: {_WANTED}")
    store = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    if (folder / MARK).exists() and not checkpoints_in(store):
        raise UserError(f"the run {source} has saved no checkpoint: set trainer.save_freq, and train it again")
    return CheckpointStore(store).load(folder if (folder / MANIFEST).is_file() else "latest")


def described(checkpoint: Checkpoint, source: Path) -> str:
    """Which step was taken, and where the best one is if that is another; a line for people."""
    line = f"step {checkpoint.step} of {source}"
    if checkpoint.path.resolve() == source.expanduser().resolve():
        return line
    best = _best(checkpoint.path.parent)
    others = f"; the best is {best}" if best and best != checkpoint.path else ""
    return f"{line}, its newest checkpoint{others}" + (f" ({checkpoint.message})" if checkpoint.message else "")


def _best(store: Path) -> Path | None:
    """The one that `trainer.keep_best` kept."""
    judged = [(metric, path) for path in by_age(store) if (metric := read_manifest(path).metric) is not None]
    return max(judged)[1] if judged else None


_WANTED = "give a run's folder (runs/PROJECT/EXPERIMENT) or one of its checkpoints (.../checkpoints/step-000010)"
