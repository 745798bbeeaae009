"""Rules of what the keys of a config mean together: functions from a config to findings."""

from dataclasses import dataclass

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Finding:
    """Keys that do not go together, the one to change first; what is wrong; what to do.

    missing: a required key is not set yet.
    """

    keys: tuple[str, ...]
    what: str
    advice: str
    missing: bool = False
