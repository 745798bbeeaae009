"""Rules of optimizers and schedules: their options have an effect."""

from collections.abc import Iterator

from distflow.config.derived_settings import is_sharded, may_have_critic
from distflow.config.keys.optim import OptimConfig
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, Finding, Findings


def optims(config: Config) -> Iterator[tuple[str, OptimConfig]]:
    """Each optimizer of the run with its key."""
    yield f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim
    if may_have_critic(config):
        yield "critic.optim", config.critic.optim


def betas(config: Config) -> Findings:
    """Betas are decays, of an optimizer that has moments."""
    for key, optim in optims(config):
        if not all(0 <= beta < 1 for beta in optim.betas):
            what = f"{list(optim.betas)} must each be ≥ 0 and < 1"
            yield Finding((f"{key}.betas",), what, "write e.g. [0.9, 0.999]")


def eight_bits(config: Config) -> Findings:
    """The optimizer supports sharded weights."""
    keys = {ACTOR: config.actor_rollout_ref.actor.optim, "critic": config.critic.optim}
    for group, optim in keys.items():
        if is_sharded(config) and optim.optimizer == "adamw_8bit":
            key = f"{group}.optim.optimizer"
            what = "bitsandbytes does not support sharded weights"
            advice = f"set {key}=adamw, or {ACTOR}.strategy=torch"
            yield Finding((f"{ACTOR}.strategy", key), what, advice)


RULES = (betas, eight_bits)
