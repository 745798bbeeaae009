"""Rules of the policy loss and the value loss."""

from distflow.builtin_names import POLICY_LOSSES
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, Finding, Findings


def clip_ratio(config: Config) -> Findings:
    """A ratio is clipped above 0, below which it never is."""
    actor = config.actor_rollout_ref.actor
    loss = POLICY_LOSSES.get(actor.policy_loss)

    clips = loss is not None and loss.clips_ratio
    if clips and actor.clip_ratio_low is None and actor.clip_ratio > 1:
        yield Finding(
            (f"{ACTOR}.clip_ratio",),
            f"the ratio would be clipped at 1 - {actor.clip_ratio:g} < 0, which it never reaches",
            f"set {ACTOR}.clip_ratio=0.2, or {ACTOR}.clip_ratio_low to 1 or less",
        )


RULES = (clip_ratio,)
