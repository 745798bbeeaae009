"""Where a run goes on from, as it is asked for beside its config."""

from collections.abc import Sequence
from pathlib import Path

from distflow.config.errors import UserError
from distflow.config.paths import missing_path
from distflow.config.schema import schema_keys
from distflow.config.unknown import suggest


def resume_override(mode: str | None) -> list[str]:
    """As a key it is checked with the others, before anything is read."""
    return [] if mode is None else ["trainer.resume_mode='" + mode.replace("'", r"\'") + "'"]


def check_resume(resume: str | None, allow_change: Sequence[str]) -> None:
    """Raises UserError for a folder that is not there, and for what is no key."""
    if resume not in (None, "auto", "never") and not Path(resume).expanduser().is_dir():
        path = Path(resume).expanduser()
        what, advice = ("is a file", "name a run's folder, or a checkpoint's") if path.is_file() else missing_path(path)
        raise UserError(f"--resume {resume}: {what}; {advice}, or say auto or never")
    for key in allow_change:
        if key not in schema_keys():
            raise UserError(f"--allow-change {key}: there is no such key; {suggest(key, schema_keys())}")
