"""Rules of sharded and offloaded weights."""

from operator import attrgetter

from distflow.config.derived_settings import is_one_process, is_sharded
from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules import ACTOR, Finding, Findings

_STRATEGY = f"{ACTOR}.strategy"
_FSDP = f"{ACTOR}.fsdp_config"
_CRITIC_FSDP = "critic.fsdp_config"


def idle_options(config: Config) -> Findings:
    """Options of sharding need sharded weights."""
    keys = (
        f"{_FSDP}.offload_policy",
        f"{_CRITIC_FSDP}.offload_policy",
        f"{_FSDP}.fsdp_size",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
    )

    if not is_sharded(config):
        for key in keys:
            if attrgetter(key)(config) != schema_keys()[key].default:
                advice = f"set {_STRATEGY}=fsdp, or remove it"
                yield Finding((key, _STRATEGY), "each rank has whole weights", advice)


def several_ranks(config: Config) -> Findings:
    """There are ranks to shard over."""
    if is_sharded(config) and is_one_process(config):
        what = "it shards weights over the training ranks, but there is only one"
        advice = f"set trainer.n_gpus_per_node=2 or more, or {_STRATEGY}=torch"
        yield Finding((_STRATEGY, "trainer.n_gpus_per_node"), what, advice)


def offloaded_twice(config: Config) -> Findings:
    """What is always in host memory is not moved there."""
    actor = config.actor_rollout_ref.actor.fsdp_config
    critic = config.critic.fsdp_config
    for group, settings in ((_FSDP, actor), (_CRITIC_FSDP, critic)):
        for name in ("param_offload", "optimizer_offload"):
            is_twice = settings.offload_policy and getattr(settings, name)
            if is_twice and is_sharded(config):
                yield Finding(
                    (f"{group}.{name}", f"{group}.offload_policy"),
                    "with offload_policy weights and moments are always in host memory, so there "
                    "is nothing to move",
                    "remove one of them",
                )


RULES = (idle_options, offloaded_twice, several_ranks)
