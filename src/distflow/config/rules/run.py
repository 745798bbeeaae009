"""Rules of the run as a whole: its folder, the user's modules, profiled steps."""

from distflow.config.keys.schema import Config
from distflow.config.rules import Finding, Findings


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


RULES = (run_folder,)
