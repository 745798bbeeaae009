"""Rules of the run as a whole: its folder, the user's modules, profiled steps."""

from distflow.config.keys.schema import Config
from distflow.config.rules import Finding, Findings
from distflow.errors import count_of


def run_folder(config: Config) -> Findings:
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


def profiled_steps(config: Config) -> Findings:
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


RULES = (run_folder, profiled_steps)
