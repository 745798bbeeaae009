"""Which program a config asks for, and what that means for the other keys."""

from math import ceil
from typing import Literal

from distflow.config.domain_algorithm import algorithms, takes_values
from distflow.config.fsdp import ActorFsdpConfig, RefFsdpConfig, TrainedFsdpConfig
from distflow.config.keys import walk
from distflow.config.names import ESTIMATORS, PIPELINES, BuiltinPipeline, Estimator
from distflow.config.schema import Config
from distflow.config.watch import peek

CUSTOM = "custom"


def program_name(config: Config) -> str:
    """The built-in program that runs, or `custom` where the user gives one.

    `dag.custom_pipeline_fn` and `dag.nodes` come first, then `dag.pipeline`; else `algorithm.workflow_type` and
    `algorithm.adv_estimator` decide.
    """
    if config.dag.custom_pipeline_fn or config.dag.nodes:
        return CUSTOM
    is_dapo = config.algorithm.workflow_type == "DAPO"
    if config.dag.pipeline:
        return config.dag.pipeline  # the rules refuse one that contradicts workflow_type
    if is_dapo:
        return "dapo"
    estimator = find_estimator(config)
    return "ppo" if estimator and estimator.needs_critic else "grpo"


def is_rl(config: Config) -> bool:
    """Whether the program generates. One of the user's does unless `dag.generates` denies it, which is found out when
    it is bound."""
    pipeline = find_pipeline(config)
    return config.dag.generates is not False if pipeline is None else pipeline.generates


def may_have_critic(config: Config) -> bool:
    """Whether the program trains a critic; one of the user's may."""
    pipeline = find_pipeline(config)
    return pipeline is None or pipeline.has_critic or (pipeline.by_estimator and reads_values(config))


def reads_values(config: Config) -> bool:
    """Whether an estimator needs a critic, that of the run or of a domain."""
    return any(takes_values(algorithm) for _, algorithm in algorithms(config))


def find_pipeline(config: Config) -> BuiltinPipeline | None:
    """The built-in program that runs; None for a user's."""
    return PIPELINES.get(program_name(config))


def find_estimator(config: Config) -> Estimator | None:
    """The built-in estimator that is chosen; None for a user's."""
    return ESTIMATORS.get(config.algorithm.adv_estimator)


def may_have_user_names(config: Config) -> bool:
    """Whether modules of the user are loaded that may register names of their own."""
    return bool(config.trainer.imports or config.dag.custom_pipeline_fn or config.dag.nodes)


def is_sharded(config: Config) -> bool:
    """Whether models lie over the ranks that train."""
    return config.actor_rollout_ref.actor.strategy == "fsdp"


def fsdp_groups(config: Config) -> dict[str, ActorFsdpConfig | TrainedFsdpConfig | RefFsdpConfig]:
    """What is said of how each model lies over ranks, by the dotted name of the group."""
    settings = config.actor_rollout_ref
    return {
        "actor_rollout_ref.actor.fsdp_config": settings.actor.fsdp_config,
        "critic.fsdp_config": config.critic.fsdp_config,
        "actor_rollout_ref.ref.fsdp_config": settings.ref.fsdp_config,
    }


def offload_keys(config: Config) -> list[str]:
    """Those that are on by which something waits in the host's memory; looked at without using them."""
    groups = fsdp_groups(peek(config))
    return [name for prefix, group in groups.items() for name, _, value, _ in walk(group, prefix) if value is True]


def optimizer_steps(config: Config, role: Literal["actor", "critic"], steps: int) -> int:
    """Optimizer steps of a role over `steps` training steps: the actor takes none while the critic warms up."""
    trained = steps - config.trainer.critic_warmup if role == "actor" else steps
    return trained * optimizer_steps_a_step(config, role)


def optimizer_steps_a_step(config: Config, role: Literal["actor", "critic"]) -> int:
    """One for each mini-batch of each pass over a batch, of which the last may be short. Examples are passed once."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    mini_batch, passes = actor.ppo_mini_batch_size, actor.ppo_epochs if is_rl(config) else 1
    if role == "critic":
        mini_batch, passes = critic.ppo_mini_batch_size or mini_batch, critic.ppo_epochs
    return passes * ceil(config.data.train_batch_size / mini_batch)


def clip_range(config: Config) -> tuple[float, float]:
    """How far the ratio may fall and rise."""
    actor = config.actor_rollout_ref.actor
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high
