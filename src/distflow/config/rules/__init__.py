"""Rules about combinations of keys, grouped by subject: functions from a config to findings."""

from collections.abc import Iterator
from dataclasses import dataclass

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Finding:
    """A contradiction: the keys, beginning with the one to change; what is wrong; what to do.

    missing: a required key is not set yet.
    """

    keys: tuple[str, ...]
    what: str
    advice: str
    missing: bool = False


Findings = Iterator[Finding]
"""What a rule yields."""
