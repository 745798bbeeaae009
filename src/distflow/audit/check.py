"""What a check of the auditor is."""

from collections.abc import Callable
from dataclasses import dataclass

from distflow.audit.recorded_data import RecordedStep


class Wrong(Exception):
    """What was seen is not what the claim says; the message is for the user."""


@dataclass(frozen=True)
class Check:
    """One claim about a step.

    needs: without what it cannot be proven. limit: how far what is found may be from what is expected, in words.
    prove: returns None where the claim is proven, "" where the pipeline has nothing that it is about, else why it
    cannot be proven; raises Wrong where it does not hold.
    """

    name: str
    claim: str
    needs: str
    limit: str
    prove: Callable[[RecordedStep], str | None]
