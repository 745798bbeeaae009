"""Settings that follow from several keys: the pipeline, the domains' algorithms, data and rewards,
sizes, step counts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Any, Literal

from distflow.builtin_names import (
    CUSTOM_REWARD,
    ESTIMATORS,
    LAUNCHERS,
    PIPELINES,
    SEVERAL_PROCESSES,
    BuiltinPipeline,
)
from distflow.config.compose.setting_origins import pipeline_of_algorithm
from distflow.config.compose.unknown_keys import suggest
from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.actor_rollout_ref import RefConfig
from distflow.config.keys.algorithm import DIFFERING_LOSS, AlgorithmConfig
from distflow.config.keys.critic import CriticConfig
from distflow.config.keys.dag import FIRST_POLICY
from distflow.config.keys.declare import changed, walk
from distflow.config.keys.distill import TEACHER, TeacherConfig, teachers_of
from distflow.config.keys.reward import REWARD_MODEL, RewardPart, ScoringModelConfig, scoring_models
from distflow.config.keys.schema import Config, schema_keys, with_values
from distflow.config.rules import ACTOR
from distflow.errors import UserError, allow_change_advice


def algorithm_of(config: Config, domain: str | None) -> AlgorithmConfig:
    """The settings of a domain; those of the run for None or a domain without overrides."""
    own = None
    if domain is not None:
        own = config.algorithm.domains.get(domain)

    if own is None:
        return config.algorithm
    return replace(changed(config.algorithm, own), domains={})


def algorithms(config: Config) -> Iterator[tuple[str | None, AlgorithmConfig]]:
    """(domain, its settings), beginning with (None, the run's settings)."""
    for domain in (None, *config.algorithm.domains):
        yield domain, algorithm_of(config, domain)


POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
PREFERENCE_LOSS = "algorithm.preference_loss"
ADV_ESTIMATOR = "algorithm.adv_estimator"


def named_algorithms(config: Config) -> list[tuple[str, str]]:
    """(key, name) of policy loss and estimator, and of those that domains override; of a pipeline
    that has no advantages, that of its preference loss, if it has one."""
    if is_online(config) or (reads_pairs(config) and not trains_scores(config)):
        return [(PREFERENCE_LOSS, config.algorithm.preference_loss)]
    if not is_rl(config):
        return []

    run = config.algorithm.adv_estimator
    named = [(POLICY_LOSS, config.actor_rollout_ref.actor.policy_loss), (ADV_ESTIMATOR, run)]

    for domain, own in algorithms(config):
        if own.adv_estimator != run:
            named.append((f"algorithm.domains.{domain}.adv_estimator", own.adv_estimator))

    for domain in own_losses(config):
        loss = config_of(config, domain).actor_rollout_ref.actor.policy_loss
        named.append((f"algorithm.domains.{domain}.policy_loss", loss))

    return named


def own_losses(config: Config) -> list[str]:
    """The domains that override a key of the policy loss."""
    return [
        name
        for name, own in config.algorithm.domains.items()
        if not own.keys().isdisjoint(DIFFERING_LOSS)
    ]


def config_of(config: Config, domain: str | None) -> Config:
    """The config with the settings of a domain; one with its own policy loss does not take over the
    options of the run's."""
    own = replace(config, algorithm=replace(algorithm_of(config, domain), domains={}))
    changes = {} if domain is None else {**config.algorithm.domains.get(domain, {})}

    losses = {name: value for name, value in changes.items() if name in DIFFERING_LOSS}
    if "policy_loss" in losses:
        losses = {"policy_loss_kwargs": {}, **losses}

    size = None
    if domain in config.data.domains:
        size = config.data.domains[domain].n

    if size is None and not losses:
        return own

    group = own.actor_rollout_ref
    rollout = group.rollout if size is None else replace(group.rollout, n=size)

    actor = changed(group.actor, losses)
    return replace(own, actor_rollout_ref=replace(group, rollout=rollout, actor=actor))


def takes_values(algorithm: AlgorithmConfig) -> bool:
    """Whether the estimator needs a critic."""
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    return estimator is not None and estimator.needs_critic


CUSTOM = "custom"

ENGINE = "actor_rollout_ref.rollout.name"
WORKFLOW = "actor_rollout_ref.rollout.workflow"
BY_WORKFLOW = frozenset({"responses", "rollout_log_probs", "scores", "reward_parts", "acc"})
"""Columns that a workflow (`rollout.workflow`) fills."""


def code_of_workflow(config: Config) -> list[tuple[str, str]]:
    """(key, target) of user code in `rollout.workflow`: the workflow, its tools, environment and
    agent."""
    rollout = config.actor_rollout_ref.rollout
    named = _code_of_options(f"{WORKFLOW}_kwargs", rollout.workflow_kwargs)
    if rollout.workflow == "by_domain":
        for domain, own in rollout.workflow_kwargs.items():
            named += _code_of_options(
                f"{WORKFLOW}_kwargs.{domain}", own if isinstance(own, dict) else {"workflow": own}
            )

    named += [(WORKFLOW, rollout.workflow)]
    return [(key, target) for key, target in named if isinstance(target, str) and ":" in target]


def _code_of_options(key: str, options: Mapping[str, object]) -> list[tuple[str, object]]:
    """(key, value) of options of a workflow that may name code."""
    named = list[tuple[str, object]]()
    tools = options.get("tools")
    if isinstance(tools, list | tuple):
        for tool in tools:
            name = tool.get("name") if isinstance(tool, dict) else tool
            named.append((f"{key}.tools", name))

    for option in ("workflow", "env", "function", "reward"):
        named.append((f"{key}.{option}", options.get(option)))
    return named


def pipeline_name(config: Config) -> str:
    """The built-in pipeline that runs, or `custom` if `dag.pipeline` is the user's own. If it is
    null, `algorithm.workflow_type` and `algorithm.adv_estimator` decide."""
    chosen = config.dag.pipeline
    if chosen is not None and not (isinstance(chosen, str) and chosen in PIPELINES):
        return CUSTOM
    workflow_type = config.algorithm.workflow_type
    return chosen or pipeline_of_algorithm(workflow_type, config.algorithm.adv_estimator) or "grpo"


def is_rl(config: Config) -> bool:
    """Whether the pipeline generates. A custom one counts as such unless `dag.generates` is false;
    binding verifies it."""
    pipeline = find_pipeline(config)
    if pipeline is None:
        return config.dag.generates is not False
    return pipeline.generates


def reads_pairs(config: Config) -> bool:
    """Whether the rows of the pipeline are pairs of responses."""
    pipeline = find_pipeline(config)
    return pipeline is not None and pipeline.reads_pairs


def reads_labels(config: Config) -> bool:
    """Whether the rows of the pipeline are responses with a label."""
    pipeline = find_pipeline(config)
    return pipeline is not None and pipeline.reads_labels


def is_online(config: Config) -> bool:
    """Whether the pipeline makes pairs of the policy's own responses."""
    pipeline = find_pipeline(config)
    return pipeline is not None and pipeline.is_online


def trains_scores(config: Config) -> bool:
    """Whether the pipeline trains a reward model."""
    pipeline = find_pipeline(config)
    return pipeline is not None and pipeline.trains_scores


def may_have_critic(config: Config) -> bool:
    """Whether the pipeline trains a critic; a custom pipeline may."""
    pipeline = find_pipeline(config)
    return (
        pipeline is None or pipeline.has_critic or (pipeline.by_estimator and reads_values(config))
    )


def reads_values(config: Config) -> bool:
    """Whether the estimator of the run or of a domain needs a critic."""
    return any(takes_values(algorithm) for _, algorithm in algorithms(config))


def find_pipeline(config: Config) -> BuiltinPipeline | None:
    """The built-in pipeline that runs; None for a custom one."""
    return PIPELINES.get(pipeline_name(config))


def functions_of_pipeline(config: Config) -> list[str]:
    """The functions that `dag.pipeline` names: the one that builds a custom pipeline, or those of
    its nodes."""
    pipeline = config.dag.pipeline
    if not pipeline or pipeline_name(config) != CUSTOM:
        return []
    if isinstance(pipeline, str):
        return [pipeline]
    return [str(node["func"]) for node in pipeline if "func" in node]


def is_one_process(config: Config) -> bool:
    """Whether the whole run is in the process that starts it."""
    trainer = config.trainer
    return trainer.launcher == "local" and trainer.n_gpus_per_node == 1 and not trainer.allocation


def launch_target(config: Config) -> str:
    launcher = config.trainer.launcher
    if launcher == "local" and not is_one_process(config):
        return SEVERAL_PROCESSES
    return LAUNCHERS[launcher].target


def is_sharded(config: Config) -> bool:
    return config.actor_rollout_ref.actor.strategy == "fsdp"


def frozen_models(config: Config) -> dict[str, ScoringModelConfig | TeacherConfig]:
    """Reward models, judges and teachers by engine name."""
    return {**scoring_models(config.reward_model), **teachers_of(config.distill)}


def model_of(config: Config, role: str) -> tuple[str, str | None]:
    """The key that names a role's model, and its path."""
    models = frozen_models(config)
    if role in models:
        return f"{_group_of(role)}.path", models[role].path
    if role == "critic" and config.critic.model.path is not None:
        return "critic.model.path", config.critic.model.path
    if role == "ref" and config.actor_rollout_ref.ref.path is not None:
        return "actor_rollout_ref.ref.path", config.actor_rollout_ref.ref.path

    return "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path


def _group_of(role: str) -> str:
    """The keys of a frozen model."""
    if role == REWARD_MODEL:
        return "reward_model.model"
    if role == TEACHER:
        return "distill.teacher"
    if role.startswith(TEACHER):
        return f"distill.teachers.{role.removeprefix(f'{TEACHER}_')}"
    return f"reward_model.models.{role}"


def is_own_reference(config: Config) -> bool:
    """Whether the reference is the policy with its adapter switched off."""
    settings = config.actor_rollout_ref
    return settings.model.lora_rank > 0 and settings.ref.path is None


def offload_keys(config: Config) -> list[str]:
    """The enabled keys for offloading to host memory."""
    settings = config.actor_rollout_ref
    critic = config.critic
    owners: dict[str, ActorConfig | CriticConfig | RefConfig] = {
        ACTOR: settings.actor,
        "critic": critic,
        "actor_rollout_ref.ref": settings.ref,
    }

    found = []
    for name, owner in owners.items():
        for key, _, value, _ in walk(owner.fsdp_config, f"{name}.fsdp_config"):
            if value is True:
                found.append(key)

    models = frozen_models(config)
    return found + [
        f"{_group_of(name)}.param_offload" for name in models if models[name].param_offload
    ]


Role = Literal["actor", "critic"]


def optimizer_steps(config: Config, role: Role, steps: int) -> int:
    """Optimizer steps of a role in `steps` training steps: the actor takes none while the critic
    warms up."""
    trained = steps
    if role == "actor":
        trained = steps - config.trainer.critic_warmup
    return trained * optimizer_steps_a_step(config, role)


def optimizer_steps_a_step(config: Config, role: Role) -> int:
    """One per mini-batch of each pass over a batch; the last mini-batch may be smaller. SFT makes
    one pass."""
    actor = config.actor_rollout_ref.actor
    critic = config.critic

    mini_batch = actor.ppo_mini_batch_size
    passes = actor.ppo_epochs if is_rl(config) else 1
    if role == "critic":
        mini_batch = critic.ppo_mini_batch_size or mini_batch
        passes = critic.ppo_epochs

    return passes * ceil(config.data.train_batch_size / mini_batch)


def clip_range(config: Config) -> tuple[float, float]:
    """How far the ratio may fall below 1, and rise above it."""
    actor = config.actor_rollout_ref.actor
    low = actor.clip_ratio_low
    if low is None:
        low = actor.clip_ratio
    high = actor.clip_ratio_high
    if high is None:
        high = actor.clip_ratio

    return low, high


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run, each None until known: the number of training rows, and the model's
    context in tokens. not_embedded: why the embedded engine cannot run the model, if it cannot."""

    rows: int | None = None
    context: int | None = None
    not_embedded: str | None = None


def run_steps(config: Config, room: RunLimits) -> int | None:
    """Training steps of the run; None until known."""
    trainer = config.trainer
    if trainer.total_training_steps is not None or room.rows is None:
        return trainer.total_training_steps
    return -(-trainer.total_epochs * room.rows // config.data.train_batch_size)


def resume_override(mode: str | None) -> list[str]:
    """`--resume` as an override, so that it is checked with the other keys. Raises UserError for
    other types."""
    if not isinstance(mode, str | None):
        raise UserError(
            f"resume={mode!r}: write 'auto', 'never', or the folder of a checkpoint as a str"
        )
    if mode is None:
        return []
    return ["trainer.resume_mode='" + mode.replace("'", r"\'") + "'"]


def policies_of(config: Config) -> tuple[str, ...]:
    return (FIRST_POLICY, *config.dag.policies)


def policies_of_agents(config: Config) -> dict[str, str]:
    """The policy of each agent of an episode; empty unless the agents have several policies."""
    found = {name: agent.policy for name, agent in config.actor_rollout_ref.rollout.agents.items()}
    return found if {*found.values()} - {FIRST_POLICY} else {}


def policy_of_conversation(config: Config, name: str) -> str:
    """The policy of a conversation of an episode. name: of an agent or a fork of one; empty for the
    first agent. Returns "" if there is only one policy."""
    owners = policies_of_agents(config)
    if owners:
        return owners.get(name.partition(".")[0], next(iter(owners.values())))
    return ""


def agent_sampling(config: Config, conversation: str) -> dict[str, float]:
    """The sampling that the agent of a conversation overrides, by the names of `SamplingParams`."""
    agents = config.actor_rollout_ref.rollout.agents
    if agents:
        return agents.get(conversation.partition(".")[0], next(iter(agents.values()))).sampling
    return {}


def agent_temperatures(config: Config) -> dict[str, float | None]:
    """The temperature of each agent, None for the run's or the domain's; empty if no agent has its
    own."""
    found = {
        name: agent.temperature for name, agent in config.actor_rollout_ref.rollout.agents.items()
    }
    return found if any(found.values()) else {}


def trained_policies(config: Config) -> tuple[str, ...]:
    """The trained policies of agents; empty unless the agents have several policies."""
    agents = config.actor_rollout_ref.rollout.agents
    policies = policies_of_agents(config)
    trained = {policies[name] for name, agent in agents.items() if agent.trainable and policies}
    return tuple(name for name in policies_of(config) if name in trained)


def config_of_policy(config: Config, policy: str) -> Config:
    """The config with the policy's own keys in place of those of `actor_rollout_ref`, and with its
    own seed."""
    own = {
        f"actor_rollout_ref.{name}": value
        for name, value in config.dag.policies.get(policy, {}).items()
    }
    seed = config.trainer.seed + policies_of(config).index(policy)
    return with_values(config, {**own, "trainer.seed": seed})


def policy_of(config: Config) -> str:
    """The policy that a run of this config trains."""
    return config.dag.policy or FIRST_POLICY


def with_own_policies(config: Config) -> dict[str, list[str]]:
    """The overrides of each policy's run, which has its own folder; empty if the config describes a
    single run."""
    dag = config.dag
    trainer = config.trainer
    if not dag.policies or dag.policy is not None or policies_of_agents(config):
        return {}

    key = "default_local_dir"
    value = str(trainer.run_dir)
    if trainer.default_local_dir is None:
        key = "experiment_name"
        value = trainer.experiment_name

    value = value.replace("'", r"\'")
    overrides = {}
    for name in policies_of(config):
        overrides[name] = [f"dag.policy={name}", f"trainer.{key}='{value}-{name}'"]
    return overrides


def check_keys(allow_change: Sequence[str]) -> None:
    for key in allow_change:
        if key not in schema_keys():
            raise UserError(
                f"{allow_change_advice([key])}: there is no such key; {suggest(key, schema_keys())}"
            )


Files = dict[str, tuple[str, ...]]
"""Files by key."""


def data_files(config: Config, name: str) -> Files:
    """The files of the domains, and those of `data`. name: train_files or val_files."""
    domains = config.data.domains
    common = getattr(config.data, name)
    own = {
        f"data.domains.{domain}.{name}": getattr(settings, name)
        for domain, settings in domains.items()
    }
    return own | ({f"data.{name}": common} if common or not own else {})


def own_setting(config: Config, domain: str, common: object, name: str) -> Any:
    """The domain's setting of that name, or that of the group `common` if the domain has none."""
    value = getattr(config.data.domains.get(domain), name, None)
    return getattr(common, name) if value is None else value


def chooses_by_tags(config: Config, domain: str, name: str) -> bool:
    """Whether the domain's rows are those in the files of `data` with its tags. name: of the key
    for files."""
    settings = config.data.domains.get(domain)
    return settings is not None and bool(
        settings.tags and getattr(config.data, name) and not getattr(settings, name)
    )


def domain_of_tag(config: Config) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, domain in config.data.domains.items():
        for tag in domain.tags:
            found[tag] = name
    return found


def validates(config: Config) -> bool:
    return any(data_files(config, "val_files").values())


def reward_functions(config: Config) -> Mapping[str, tuple[RewardPart, ...]]:
    """The reward functions by domain, from `reward.functions` and the domains' own `reward`.
    Without `data.domains`, `default` applies to all domains that are not listed; with it, each
    domain with reward functions is listed."""
    functions = config.reward.functions
    domains = config.data.domains
    chosen = {
        name: domain.reward or functions.get(name) or functions.get("default", ())
        for name, domain in domains.items()
    } or functions
    return {name: parts for name, parts in chosen.items() if parts}


def reward_parts(config: Config) -> list[RewardPart]:
    """The reward functions of all domains."""
    return list(chain.from_iterable(reward_functions(config).values()))


def named_rewards(config: Config) -> Iterator[tuple[str, str, tuple[RewardPart, ...]]]:
    """(key, domain, reward functions) for each key that names some."""
    for name, parts in config.reward.functions.items():
        yield f"reward.functions.{name}", name, parts
    for name, domain in config.data.domains.items():
        yield f"data.domains.{name}.reward", name, domain.reward


def uses_custom_reward(config: Config) -> bool:
    return any(part.name == CUSTOM_REWARD for part in reward_parts(config))


def response_limit(config: Config, domain: str) -> int:
    """The longest response to a prompt of the domain, in tokens."""
    own = config.data.domains.get(domain)
    longest = config.data.max_response_length
    if own is None or own.max_response_length is None:
        return longest
    return own.max_response_length


def temperatures(config: Config) -> dict[str, float]:
    """Temperatures of the domains that override the run's."""
    common = config.actor_rollout_ref.rollout.temperature
    own = {}
    for name, domain in config.data.domains.items():
        if domain.temperature is not None and domain.temperature != common:
            own[name] = domain.temperature
    return own


def unfiltered_domains(config: Config) -> frozenset[str]:
    enable = config.algorithm.filter_groups.enable
    return frozenset(
        name
        for name, domain in config.data.domains.items()
        if not (enable if domain.filter_groups is None else domain.filter_groups)
    )


def filters_groups(config: Config) -> bool:
    """Whether groups without a signal are dropped, in at least one domain."""
    if config.data.domains:
        return len(unfiltered_domains(config)) < len(config.data.domains)
    return config.algorithm.filter_groups.enable
