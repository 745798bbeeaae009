"""Rules of the advantage estimator: what it compares, and which rewards it reads."""

from distflow.builtin_names import ESTIMATORS, WORKFLOWS, Estimator
from distflow.config.derived_settings import (
    ADV_ESTIMATOR,
    WORKFLOW,
    is_online,
    is_rl,
    may_have_critic,
    pipeline_name,
)
from distflow.config.keys.algorithm import AlgorithmConfig
from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules import ACTOR, ROLLOUT, Finding, Findings

_OF_EPISODES = ("reward_shift", "reward_scale", "reward_clip")


def estimator_of(config: Config) -> Estimator:
    """The built-in estimator; a user's own counts as one without properties."""
    return ESTIMATORS.get(config.algorithm.adv_estimator, Estimator("your own"))


def compares_rewards(config: Config) -> bool:
    """Whether the estimator compares the rewards of whole responses to a prompt."""
    estimator = estimator_of(config)
    return estimator.needs_group or estimator.needs_greedy


def has_several_rewards(algorithm: AlgorithmConfig) -> bool:
    """Whether the turns or agents of an episode have separate advantages."""
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    if estimator is not None and estimator.is_over_turns:
        return True
    over_turns = bool(algorithm.adv_estimator_kwargs.get("over_turns"))
    return over_turns or algorithm.agent_rewards != "shared"


def has_rewards_within(config: Config) -> bool:
    """Whether parts of an episode have rewards of their own: turns, agents, actions or chunks."""
    algorithm = config.algorithm
    return has_several_rewards(algorithm) or algorithm.reward_level != "token"


def levels(config: Config) -> Findings:
    """Actions, chunks and decisions are those of a workflow whose replies have actions."""
    acting = [name for name, entry in WORKFLOWS.items() if entry.unit_tokens]
    workflow = config.actor_rollout_ref.rollout.workflow

    for name in ("logprob_level", "reward_level", "sample_level"):
        key = f"algorithm.{name}"
        default = schema_keys()[key].default
        if getattr(config.algorithm, name) != default and workflow not in acting:
            yield Finding(
                (key, WORKFLOW),
                f"only the workflow {' or '.join(acting)} has actions, chunks and decisions",
                f"set {key}={default}, or {WORKFLOW}={acting[0]}",
            )


def pipeline_key(config: Config) -> str:
    """The key that selects the pipeline."""
    if config.dag.pipeline:
        return "dag.pipeline"
    return "algorithm.workflow_type"


def scoring_key(config: Config) -> str:
    """The key that names reward models or judges; empty if there are none."""
    if config.reward_model.models:
        return "reward_model.models"
    if config.reward_model.model.path:
        return "reward_model.model.path"
    return ""


def group_of_one(config: Config) -> Findings:
    """An estimator, or a preference loss, that compares the samples of a prompt has several."""
    algorithm = config.algorithm
    is_single = config.actor_rollout_ref.rollout.n == 1 and not algorithm.allow_group_of_one
    if is_online(config):
        if config.actor_rollout_ref.rollout.n == 1:
            what = "online preferences compare the samples of a prompt, but there is only one"
            yield Finding((f"{ROLLOUT}.n",), what, f"set {ROLLOUT}.n=8")
    elif is_rl(config) and is_single and estimator_of(config).needs_group:
        yield Finding(
            (f"{ROLLOUT}.n", ADV_ESTIMATOR),
            f"{algorithm.adv_estimator} compares the samples of a prompt, but there is only one",
            f"set {ROLLOUT}.n=8, or algorithm.adv_estimator=reinforce_plus_plus, or "
            "algorithm.allow_group_of_one=true if this is intended",
        )


def remax_in_workflow(config: Config) -> Findings:
    """ReMax's greedy baseline is a single response."""
    if estimator_of(config).needs_greedy and config.actor_rollout_ref.rollout.workflow is not None:
        what = "remax compares with one greedy response, which is not an episode of a workflow"
        yield Finding(
            (f"{ROLLOUT}.workflow", ADV_ESTIMATOR), what, "set algorithm.adv_estimator=rloo"
        )


def remax_and_models(config: Config) -> Findings:
    """ReMax's greedy baseline is scored by reward functions alone."""
    key = scoring_key(config)
    if key and estimator_of(config).needs_greedy:
        yield Finding(
            (key, ADV_ESTIMATOR),
            "ReMax's baseline is scored by reward functions, and would not include the model's "
            "score",
            "make it a reward function: reward.functions={default: [{name: model, options: {path: "
            "DIR}}]}",
        )


def needs_critic(config: Config) -> Findings:
    """The pipeline has the critic whose values the estimator reads."""
    estimator = config.algorithm.adv_estimator
    if is_rl(config) and estimator_of(config).needs_critic and not may_have_critic(config):
        yield Finding(
            (ADV_ESTIMATOR, pipeline_key(config)),
            f"{estimator} needs the values of a critic, but the pipeline {pipeline_name(config)} "
            "has none",
            "set dag.pipeline=ppo, or dag.pipeline=rlvr for domains, or an estimator without a "
            "critic such as algorithm.adv_estimator=grpo",
        )


def changed_sum(config: Config) -> Findings:
    """What changes the sum of the reward has no effect on an estimator that reads its parts."""
    algorithm = config.algorithm
    if not estimator_of(config).reads_parts:
        return

    what = f"{algorithm.adv_estimator} reads the parts of the reward, not their sum"
    for name in (*_OF_EPISODES, "whiten_rewards"):
        if getattr(algorithm, name) != getattr(AlgorithmConfig, name):
            advice = "set algorithm.adv_estimator=grpo, or remove it"
            yield Finding((f"algorithm.{name}", ADV_ESTIMATOR), what, advice)

    if config.reward.on_error not in ("mask", "drop"):
        why = f"{what}, but a fixed score has no parts"
        yield Finding(("reward.on_error", ADV_ESTIMATOR), why, "set it to mask or drop")

    if algorithm.use_kl_in_reward:
        advice = f"set {ACTOR}.use_kl_loss=true instead"
        keys = ("algorithm.use_kl_in_reward", ADV_ESTIMATOR)
        yield Finding(keys, f"{what}, which has the KL", advice)


def rewards_within_episodes(config: Config) -> Findings:
    """What changes the reward of an episode does not change those of its turns or agents."""
    algorithm = config.algorithm
    if not has_rewards_within(config):
        return

    names = [n for n in _OF_EPISODES if getattr(algorithm, n) != getattr(AlgorithmConfig, n)]
    norm = algorithm.reward_norm
    if norm.mean_level or norm.std_level:
        names.append("reward_norm.mean_level" if norm.mean_level else "reward_norm.std_level")

    for name in names:
        yield Finding(
            (f"algorithm.{name}", ADV_ESTIMATOR),
            "turns or agents have rewards of their own, and this makes one reward of each "
            "episode's",
            "remove it, and change the rewards in the workflow",
        )


RULES = (
    levels,
    group_of_one,
    remax_in_workflow,
    remax_and_models,
    needs_critic,
    changed_sum,
    rewards_within_episodes,
)
