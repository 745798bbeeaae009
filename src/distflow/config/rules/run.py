"""Rules of the run: validation, checkpoints, names."""

import os
from collections.abc import Iterator
from pathlib import Path

from distflow.config.derived_settings import data_files, validates
from distflow.config.keys.schema import Config
from distflow.config.keys.trainer_async_and_trust import StopCondition
from distflow.config.rules import Finding
from distflow.errors import count_of, missing_path, nearest


def validation(config: Config) -> Iterator[Finding]:
    """Validation has data."""
    if config.trainer.val_before_train and not validates(config):
        yield Finding(
            ("trainer.val_before_train", _val_files(config)),
            "there is no validation data",
            f"set {_val_files(config)}, or trainer.val_before_train=false",
            missing=True,
        )


def _val_files(config: Config) -> str:
    return next(iter(data_files(config, "val_files")))


def stop_when(config: Config) -> Iterator[Finding]:
    """A validation metric needs validation."""
    trainer = config.trainer
    if trainer.stop_when is None or not StopCondition.of(trainer.stop_when).is_of_validation:
        return
    if not validates(config):
        what = "without validation there is no such metric"
        advice = f"set {_val_files(config)}"
    elif _never(config, "test_freq") and not trainer.keep_best:
        what = "trainer.test_freq disables validation, so there is no such metric"
        advice = "set trainer.test_freq=10"
    else:
        return
    yield Finding(
        ("trainer.stop_when", _val_files(config)), what, f"{advice}, or remove trainer.stop_when"
    )


def _never(config: Config, name: str) -> bool:
    """Whether neither steps nor epochs nor seconds are set."""
    steps, *others = (getattr(config.trainer, name + unit) for unit in ("", "_epochs", "_secs"))
    return steps <= 0 and others == [None, None]


def keep_best(config: Config) -> Iterator[Finding]:
    """`keep_best` needs checkpoints and validation."""
    trainer = config.trainer
    if not trainer.keep_best:
        return
    if not validates(config):
        yield Finding(
            ("trainer.keep_best", _val_files(config)),
            "without validation there is no best checkpoint",
            f"set {_val_files(config)}, or trainer.keep_best=false",
        )
    for name in ("test_freq", "save_freq"):
        if _never(config, name):
            yield Finding(
                (f"trainer.{name}", "trainer.keep_best"),
                f"{getattr(trainer, name)} disables it, so there is no best checkpoint",
                f"set trainer.{name}=10, or trainer.keep_best=false",
            )


def resume(config: Config) -> Iterator[Finding]:
    """The checkpoint to resume from exists; a run that restarts automatically resumes from its
    own."""
    mode = config.trainer.resume_mode
    launcher = config.trainer.launcher
    restarts = config.trainer.max_restarts
    if mode not in ("auto", "never") and (launcher == "slurm" or restarts):
        keys = (
            "trainer.resume_mode",
            "trainer.launcher" if launcher == "slurm" else "trainer.max_restarts",
        )
        what = (
            "a run that restarts automatically must resume from its own checkpoints, and may have "
            "none yet"
        )
        yield Finding(
            keys,
            what,
            f"train to the first one without {keys[1]}, then use trainer.resume_mode=auto",
        )
    path = os.path.expanduser(mode)
    if mode not in ("auto", "never") and not os.path.isdir(path):
        what, advice = (
            ("is a file", "name its folder") if os.path.isfile(path) else missing_path(Path(path))
        )
        if near := nearest(mode, ("auto", "never")):
            advice = f"did you mean '{near}'"
        ways = "auto, never (verl's disable), or the folder of a run or a checkpoint"
        yield Finding(("trainer.resume_mode",), what, f"{advice}; it takes {ways}")


def run_folder(config: Config) -> Iterator[Finding]:
    """Project and experiment are names of folders inside `runs`."""
    trainer = config.trainer
    if trainer.default_local_dir is not None:
        return
    for name, value in (
        ("project_name", trainer.project_name),
        ("experiment_name", trainer.experiment_name),
    ):
        if value.strip() in ("", ".", "..") or "/" in value or "\0" in value:
            yield Finding(
                (f"trainer.{name}",),
                f"'{value}' is not a valid folder name",
                "choose a name without slashes, or set trainer.default_local_dir",
            )


def user_modules(config: Config) -> Iterator[Finding]:
    """`trainer.imports` names modules, not files."""
    for module in config.trainer.imports:
        if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
            advice = f"write {Path(module).stem}, and make sure that Python finds it (PYTHONPATH)"
            yield Finding(("trainer.imports",), f"'{module}' is not a module name", advice)


def profiled_steps(config: Config) -> Iterator[Finding]:
    """At least one of the steps to profile exists."""
    total = config.trainer.total_training_steps
    if config.profiler.enable and not any(
        1 <= step <= (total or step) for step in config.profiler.steps
    ):
        last = "" if total is None else f", and the run has {count_of(total, 'step')}"
        what = f"none of these steps exists: they are counted from 1{last}"
        yield Finding(
            ("profiler.steps", "profiler.enable"),
            what,
            "set profiler.steps=[1], or profiler.enable=false",
        )


RULES = (validation, stop_when, keep_best, resume, run_folder, user_modules, profiled_steps)
