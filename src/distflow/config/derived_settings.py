"""Settings that follow from several keys: the pipeline that runs, the algorithm of a domain, sizes and step counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from distflow.builtin_names import ESTIMATORS, PIPELINES, BuiltinPipeline, Estimator
from distflow.config.compose.key_usage import peek, with_group
from distflow.config.compose.unknown_keys import suggest
from distflow.config.keys.algorithm import AlgorithmConfig
from distflow.config.keys.declare import changed, walk
from distflow.config.keys.engines import ActorFsdpConfig, OptimConfig, RefFsdpConfig, TrainedFsdpConfig
from distflow.config.keys.schema import Config, schema_keys
from distflow.errors import UserError


def algorithm_of(config: Config, domain: str | None) -> AlgorithmConfig:
    """Of that domain; that of the run for None, and where the domain has no settings of its own."""
    own = config.algorithm.domains.get(domain) if domain is not None else None
    return config.algorithm if own is None else replace(changed(peek(config.algorithm), own), domains={})


def algorithms(config: Config) -> Iterator[tuple[str | None, AlgorithmConfig]]:
    """By domain, that of the run first."""
    for domain in (None, *config.algorithm.domains):
        yield domain, algorithm_of(config, domain)


def config_of(config: Config, domain: str | None) -> Config:
    """The run's config as that domain has it. Its keys that are read count as those of the run."""
    own = with_group(config, "algorithm", replace(peek(algorithm_of(config, domain)), domains={}))
    size = None if domain not in config.data.domains else config.data.domains[domain].n
    if size is None:
        return own
    actor = peek(own.actor_rollout_ref)
    return with_group(own, "actor_rollout_ref", replace(actor, rollout=replace(actor.rollout, n=size)))


def takes_values(algorithm: AlgorithmConfig) -> bool:
    """Whether its estimator needs a critic."""
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    return estimator is not None and estimator.needs_critic


CUSTOM = "custom"


def pipeline_name(config: Config) -> str:
    """The built-in pipeline that runs, or `custom` where `dag.pipeline` is the user's own. Where it is null,
    `algorithm.workflow_type` and `algorithm.adv_estimator` decide."""
    chosen = config.dag.pipeline
    if chosen is not None and not (isinstance(chosen, str) and chosen in PIPELINES):
        return CUSTOM
    is_dapo = config.algorithm.workflow_type == "DAPO"
    if chosen is not None:
        return chosen  # the rules refuse one that contradicts workflow_type
    if is_dapo:
        return "dapo"
    estimator = find_estimator(config)
    return "ppo" if estimator and estimator.needs_critic else "grpo"


def is_rl(config: Config) -> bool:
    """Whether the pipeline generates. One of the user's does unless `dag.generates` denies it, which is found out when
    it is bound."""
    pipeline = find_pipeline(config)
    return config.dag.generates is not False if pipeline is None else pipeline.generates


def may_have_critic(config: Config) -> bool:
    """Whether the pipeline trains a critic; one of the user's may."""
    pipeline = find_pipeline(config)
    return pipeline is None or pipeline.has_critic or (pipeline.by_estimator and reads_values(config))


def reads_values(config: Config) -> bool:
    """Whether an estimator needs a critic, that of the run or of a domain."""
    return any(takes_values(algorithm) for _, algorithm in algorithms(config))


def find_pipeline(config: Config) -> BuiltinPipeline | None:
    """The built-in pipeline that runs; None for a user's."""
    return PIPELINES.get(pipeline_name(config))


def find_estimator(config: Config) -> Estimator | None:
    """The built-in estimator that is chosen; None for a user's."""
    return ESTIMATORS.get(config.algorithm.adv_estimator)


def may_have_user_names(config: Config) -> bool:
    """Whether modules of the user are loaded that may register names of their own."""
    return bool(config.trainer.imports) or pipeline_name(config) == CUSTOM


def functions_of_pipeline(config: Config) -> list[str]:
    """The functions that the user's own pipeline names in `dag.pipeline`: the one that builds it, or those of its
    nodes; a marker has none."""
    own = config.dag.pipeline if pipeline_name(config) == CUSTOM else None
    if own is None or isinstance(own, str):
        return [own] if own else []
    return [str(node["func"]) for node in own if "func" in node]


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


_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class RunLimits:
    """What a run has to fit into, each None until it is known: rows to train on, the model's context in tokens."""

    rows: int | None = None
    context: int | None = None


def run_steps(config: Config, room: RunLimits) -> int | None:
    """Training steps of the run, where they are known."""
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None or room.rows is None:
        return trainer.total_training_steps
    return -(-trainer.total_epochs * room.rows // batch)


def mini_batch_sizes(config: Config) -> list[tuple[str, int]]:
    """Each key of a mini-batch that the pipeline may take, with its size."""
    asked = [(f"{_ACTOR}.ppo_mini_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if may_have_critic(config) and config.critic.ppo_mini_batch_size is not None:
        asked.append(("critic.ppo_mini_batch_size", config.critic.ppo_mini_batch_size))
    return asked


def learning_rate_warm_ups(config: Config, steps: int) -> list[tuple[str, int, int]]:
    """Each key of a warm-up in optimizer steps, with its value and how many of them the run takes."""
    roles: list[tuple[str, OptimConfig, Literal["actor", "critic"]]] = [
        (_ACTOR, config.actor_rollout_ref.actor.optim, "actor")
    ]
    if may_have_critic(config):
        roles.append(("critic", config.critic.optim, "critic"))
    return [
        (f"{prefix}.optim.lr_warmup_steps", optim.lr_warmup_steps, optimizer_steps(config, role, steps))
        for prefix, optim, role in roles
        if optim.scheduler != "constant"
    ]


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
