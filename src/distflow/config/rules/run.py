"""Rules of the run: validation, checkpoints, names."""

from collections.abc import Iterator
from pathlib import Path

from distflow.config.by_domain import val_files, validates
from distflow.config.errors import missing_path, nearest
from distflow.config.program import is_rl
from distflow.config.rules.finding import ROLLOUT, Finding
from distflow.config.schema import Config
from distflow.config.trainer import TrainerConfig


def validation(config: Config) -> Iterator[Finding]:
    """Validation that is asked for has data and answers."""
    val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
    if config.trainer.val_before_train and not validates(config):
        yield Finding(
            ("trainer.val_before_train", _val_files(config)),
            "there is nothing to validate on",
            f"set {_val_files(config)}, or trainer.val_before_train=false",
            missing=True,
        )
    if is_rl(config) and validates(config) and not val_kwargs.greedy and val_kwargs.n == 0:
        yield Finding(
            (f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.greedy"),
            "validation would ask for no answer at all",
            f"set {ROLLOUT}.val_kwargs.greedy=true, or {ROLLOUT}.val_kwargs.n=4",
        )


def _val_files(config: Config) -> str:
    return next(key for key, _ in val_files(config))


def keep_best(config: Config) -> Iterator[Finding]:
    """The best checkpoint is known only where checkpoints are saved and validated."""
    trainer = config.trainer
    if not trainer.keep_best:
        if trainer.keep_best_metric != TrainerConfig.keep_best_metric:
            yield Finding(
                ("trainer.keep_best_metric", "trainer.keep_best"),
                "no best checkpoint is kept",
                "set trainer.keep_best=true, or remove the metric",
            )
        return
    if not validates(config):
        yield Finding(
            ("trainer.keep_best", _val_files(config)),
            "without validation no checkpoint is the best",
            f"set {_val_files(config)}, or trainer.keep_best=false",
        )
    for name, value in (("test_freq", trainer.test_freq), ("save_freq", trainer.save_freq)):
        if value <= 0:
            yield Finding(
                (f"trainer.{name}", "trainer.keep_best"),
                f"{value} means never, and the best checkpoint is to be kept",
                f"set trainer.{name}=10, or trainer.keep_best=false",
            )


def resume(config: Config) -> Iterator[Finding]:
    """A checkpoint to resume from exists."""
    mode = config.trainer.resume_mode
    path = Path(mode).expanduser()
    if mode not in ("auto", "never") and not path.is_dir():
        what, advice = ("is a file", "name its folder") if path.is_file() else missing_path(path)
        if near := nearest(mode, ("auto", "never")):
            advice = f"did you mean '{near}'"
        ways = "auto, never (verl's disable), or the folder of a run or a checkpoint"
        yield Finding(("trainer.resume_mode",), what, f"{advice}; it takes {ways}")


def run_folder(config: Config) -> Iterator[Finding]:
    """Names that become folders stay inside `runs`."""
    trainer = config.trainer
    if trainer.default_local_dir is not None:
        return
    for name, value in (("project_name", trainer.project_name), ("experiment_name", trainer.experiment_name)):
        if value.strip() in ("", ".", "..") or "/" in value or "\0" in value:
            yield Finding(
                (f"trainer.{name}",),
                f"'{value}' is no name of a folder",
                "choose a name without slashes, or set trainer.default_local_dir",
            )


def saved_groups(config: Config) -> Iterator[Finding]:
    """How many steps to keep is taken only by last_k."""
    trainer = config.trainer
    if trainer.save_groups_last != TrainerConfig.save_groups_last and trainer.save_groups != "last_k":
        yield Finding(
            ("trainer.save_groups_last", "trainer.save_groups"),
            f"save_groups={trainer.save_groups} does not count steps",
            "set trainer.save_groups=last_k, or remove it",
        )


def user_modules(config: Config) -> Iterator[Finding]:
    """Modules are named, not files."""
    for module in config.trainer.imports:
        if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
            advice = f"write {Path(module).stem}, and start where Python finds it (PYTHONPATH)"
            yield Finding(("trainer.imports",), f"'{module}' is no name of a module", advice)


RULES = (validation, keep_best, resume, run_folder, saved_groups, user_modules)
