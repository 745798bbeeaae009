"""A check of the auditor, and the exception of a check that failed."""

from collections.abc import Callable
from dataclasses import dataclass

from distflow.audit.recorded_data import RecordedStep


class Wrong(Exception):
    """The recorded step contradicts the check's statement; the message is for the user."""


@dataclass(frozen=True)
class Check:
    """One statement about a step, and the function that checks it.

    needs: what the check cannot do without. limit: the tolerated difference, in words. run: returns None if the check
    passed, "" if it does not apply to the pipeline, else why it could not be made; raises Wrong if it failed.
    """

    name: str
    statement: str
    needs: str
    limit: str
    run: Callable[[RecordedStep], str | None]
