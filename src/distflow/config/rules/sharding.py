"""Rules of models that are spread over ranks (`actor.strategy=fsdp`), and of what waits in the host's memory."""

from collections.abc import Iterator

from distflow.config.keys import walk
from distflow.config.program import fsdp_groups, is_sharded
from distflow.config.rules.finding import ACTOR, Finding
from distflow.config.schema import Config

_WHOLE = f"{ACTOR}.strategy=torch"


def strategy(config: Config) -> Iterator[Finding]:
    """Weights are spread over ranks where there are several, and where all that reads them can do so in parts."""
    if not is_sharded(config):
        return
    if config.trainer.launcher == "local":
        yield Finding(
            (f"{ACTOR}.strategy", "trainer.launcher"),
            "weights would be spread over the ranks that train, and the local launcher has one process",
            f"set trainer.launcher=ray, or {_WHOLE}",
        )
        return
    optims = {ACTOR: config.actor_rollout_ref.actor.optim, "critic": config.critic.optim}
    for prefix in (prefix for prefix, optim in optims.items() if optim.optimizer == "adamw_8bit"):
        yield Finding(
            (f"{ACTOR}.strategy", f"{prefix}.optim.optimizer"),
            "bitsandbytes takes no weights that are spread over ranks",
            f"set {prefix}.optim.optimizer=adamw, or {_WHOLE}",
        )


def whole_weights(config: Config) -> Iterator[Finding]:
    """Where each rank has the weights whole, nothing is said of how they are spread."""
    if is_sharded(config):
        return
    for prefix, own in fsdp_groups(config).items():
        for (name, _, value, _), (_, _, default, _) in zip(walk(own, prefix), walk(type(own)(), prefix), strict=True):
            if value != default:
                yield Finding(
                    (name, f"{ACTOR}.strategy"),
                    "it is for weights that are spread over the ranks that train, and here each rank has them whole",
                    f"leave it out, or set {ACTOR}.strategy=fsdp and trainer.launcher=ray",
                )


def placement(config: Config) -> Iterator[Finding]:
    """Some rank has the weights; what stays in the host's memory is not moved there."""
    if not is_sharded(config):
        return
    if config.actor_rollout_ref.actor.fsdp_config.fsdp_size == 0:
        yield Finding(
            (f"{ACTOR}.fsdp_config.fsdp_size",),
            "no rank would have the weights",
            "set it to -1 for all ranks that train, or to a divisor of their number",
        )
    trained = {ACTOR: config.actor_rollout_ref.actor.fsdp_config, "critic": config.critic.fsdp_config}
    for owner, own in trained.items():
        for name in ("param_offload", "optimizer_offload"):
            if own.offload_policy and getattr(own, name):
                yield Finding(
                    (f"{owner}.fsdp_config.{name}", f"{owner}.fsdp_config.offload_policy"),
                    "with offload_policy weights and moments stay in the host's memory: nothing is left to be moved",
                    "take one of them back",
                )


RULES = (strategy, whole_weights, placement)
