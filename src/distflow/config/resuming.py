"""Where a run goes on from, as it is asked for beside its config."""

from collections.abc import Sequence

from distflow.config.errors import UserError
from distflow.config.schema import schema_keys
from distflow.config.unknown import suggest


def resume_override(mode: str | None) -> list[str]:
    """As a key it is checked with the others, before anything is read. Raises UserError for what is no text."""
    if not isinstance(mode, str | None):
        raise UserError(f"resume={mode!r}: write 'auto', 'never', or the folder of a checkpoint as a text")
    return [] if mode is None else ["trainer.resume_mode='" + mode.replace("'", r"\'") + "'"]


def check_keys(allow_change: Sequence[str]) -> None:
    """Raises UserError for what is no key."""
    for key in allow_change:
        if key not in schema_keys():
            raise UserError(f"--allow-change {key}: there is no such key; {suggest(key, schema_keys())}")
