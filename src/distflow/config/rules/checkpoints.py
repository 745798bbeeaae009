"""Rules of validation and checkpoints, and of what follows from them: the best one, early stops,
resumes."""

import os
from pathlib import Path

from distflow.config.derived_settings import data_files, validates
from distflow.config.keys.schema import Config
from distflow.config.keys.trainer import StopCondition
from distflow.config.rules import Finding, Findings
from distflow.errors import missing_path, nearest

_RESUME = "trainer.resume_mode"
_BEST = "trainer.keep_best"


def validation(config: Config) -> Findings:
    """Validation has data."""
    if config.trainer.val_before_train and not validates(config):
        files = _val_files(config)
        yield Finding(
            ("trainer.val_before_train", files),
            "there is no validation data",
            f"set {files}, or trainer.val_before_train=false",
            missing=True,
        )


def _val_files(config: Config) -> str:
    return next(iter(data_files(config, "val_files")))


def stop_when(config: Config) -> Findings:
    """A validation metric needs validation."""
    trainer = config.trainer
    if trainer.stop_when is None or not StopCondition.of(trainer.stop_when).is_of_validation:
        return

    files = _val_files(config)
    if not validates(config):
        what = "without validation there is no such metric"
        advice = f"set {files}"
    elif _never(config, "test_freq") and not trainer.keep_best:
        what = "trainer.test_freq disables validation, so there is no such metric"
        advice = "set trainer.test_freq=10"
    else:
        return

    yield Finding(("trainer.stop_when", files), what, f"{advice}, or remove trainer.stop_when")


def _never(config: Config, name: str) -> bool:
    """Whether neither steps nor epochs nor seconds are set."""
    steps, *others = (getattr(config.trainer, name + unit) for unit in ("", "_epochs", "_secs"))
    return steps <= 0 and others == [None, None]


def best_checkpoint(config: Config) -> Findings:
    """The best checkpoint needs checkpoints and validation, and its metric needs it."""
    trainer = config.trainer
    if not trainer.keep_best:
        return

    files = _val_files(config)
    if not validates(config):
        what = "without validation there is no best checkpoint"
        yield Finding((_BEST, files), what, f"set {files}, or trainer.keep_best=false")

    for name in ("test_freq", "save_freq"):
        if _never(config, name):
            key = f"trainer.{name}"
            what = f"{getattr(trainer, name)} disables it, so there is no best checkpoint"
            yield Finding((key, _BEST), what, f"set {key}=10, or trainer.keep_best=false")


def restarted_run(config: Config) -> Findings:
    """A run that restarts automatically resumes from its own checkpoints."""
    trainer = config.trainer
    is_slurm = trainer.launcher == "slurm"
    if trainer.resume_mode in ("auto", "never") or not (is_slurm or trainer.max_restarts):
        return

    cause = "trainer.launcher" if is_slurm else "trainer.max_restarts"
    yield Finding(
        (_RESUME, cause),
        "a run that restarts automatically must resume from its own checkpoints, and may have none "
        "yet",
        f"train to the first one without {cause}, then use trainer.resume_mode=auto",
    )


def resumed_folder(config: Config) -> Findings:
    """The checkpoint to resume from exists."""
    mode = config.trainer.resume_mode
    path = os.path.expanduser(mode)
    if mode in ("auto", "never") or os.path.isdir(path):
        return

    if os.path.isfile(path):
        what = "is a file"
        advice = "name its folder"
    else:
        what, advice = missing_path(Path(path))

    if near := nearest(mode, ("auto", "never")):
        advice = f"did you mean '{near}'"
    ways = "auto, never (verl's disable), or the folder of a run or a checkpoint"
    yield Finding((_RESUME,), what, f"{advice}; it takes {ways}")


RULES = (validation, stop_when, best_checkpoint, restarted_run, resumed_folder)
