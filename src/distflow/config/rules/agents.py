"""Rules of the agents of an episode, and of the policies that give their replies."""

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config.compose.typed_values import did_you_mean
from distflow.config.derived_settings import (
    ADV_ESTIMATOR,
    is_sharded,
    policies_of,
    policies_of_agents,
    trained_policies,
)
from distflow.config.keys.dag import FIRST_POLICY
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, MODEL, ROLLOUT, Finding, Findings
from distflow.config.rules.estimator import estimator_of, scoring_key

_AGENTS = f"{ROLLOUT}.agents"
_REWARDS = "algorithm.agent_rewards"
_DIFFERING = {"model.path", "model.init", "model.revision"}


def trained_agents(config: Config) -> Findings:
    """Agents are those of a workflow, and one of them is trained."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.agents and rollout.workflow is None:
        advice = f"set {ROLLOUT}.workflow=file.py:function"
        yield Finding((_AGENTS,), "only a workflow has agents", advice)

    if rollout.agents and not any(agent.trainable for agent in rollout.agents.values()):
        advice = "remove trainable: false of one of them"
        yield Finding((_AGENTS,), "none of the agents is trained", advice)


def agent_rewards(config: Config) -> Findings:
    """Rewards of agents need agents, and a reward that each of them has."""
    estimator = config.algorithm.adv_estimator
    model = scoring_key(config)
    if config.algorithm.agent_rewards == "shared":
        return

    if not config.actor_rollout_ref.rollout.agents:
        advice = f"declare them, e.g. {_AGENTS}={{solver: {{}}}}"
        yield Finding((_REWARDS, _AGENTS), "an episode has no agents", advice)

    if model:
        what = "a model scores episodes, not agents"
        yield Finding((_REWARDS, model), what, "set algorithm.agent_rewards=shared")

    if estimator_of(config).reads_parts:
        what = f"{estimator} reads the parts of the reward, which no agent has"
        yield Finding((_REWARDS, ADV_ESTIMATOR), what, "set algorithm.adv_estimator=grpo")


def known_policy(config: Config) -> Findings:
    """`dag.policy` is a policy of this config."""
    name = config.dag.policy
    known = policies_of(config)
    if name is not None and name not in known:
        advice = f"{did_you_mean(name, known)}there are {', '.join(known)}"
        yield Finding(("dag.policy", "dag.policies"), "is none of the policies", advice)


def served_policies(config: Config) -> Findings:
    """The policy of each agent exists."""
    known = policies_of(config)
    for name, agent in config.actor_rollout_ref.rollout.agents.items():
        if agent.policy not in known:
            what = f"no engine serves the policy '{agent.policy}' of the agent '{name}'"
            example = f"dag.policies={{{agent.policy}: {{model: {{path: DIR}}}}}}"
            advice = f"{did_you_mean(agent.policy, known)}declare it, e.g. {example}"
            yield Finding((_AGENTS, "dag.policies"), what, advice)


def has_several_policies(config: Config) -> bool:
    """Whether the agents have several policies, all of which exist."""
    owners = policies_of_agents(config)
    return bool(owners) and {*owners.values()} <= {*policies_of(config)}


def used_policies(config: Config) -> Findings:
    """Each policy has an agent, and the first one a trained agent."""
    if not has_several_policies(config):
        return

    if FIRST_POLICY not in trained_policies(config):
        what = f"no trained agent has the policy '{FIRST_POLICY}', which is the model of {MODEL}"
        advice = "exchange the models, so that this one is of a trained agent"
        yield Finding((_AGENTS, f"{MODEL}.path"), what, advice)

    for name in config.dag.policies:
        if name not in policies_of_agents(config).values():
            what = f"no agent has the policy '{name}'"
            yield Finding(("dag.policies", _AGENTS), what, "remove it, or give it an agent")


def settings_of_policies(config: Config) -> Findings:
    """Policies of agents set what may differ."""
    if not has_several_policies(config):
        return

    trained = trained_policies(config)
    for name, settings in config.dag.policies.items():
        for key in sorted({*settings} - _DIFFERING):
            is_optimizers = key.startswith("actor.optim.") or key == "actor.max_grad_norm"
            if is_optimizers and name in trained:
                continue

            what = (
                f"sets {key} of the policy '{name}', but policies of agents differ in their "
                "models and optimizers alone"
            )
            if is_optimizers:
                what = f"sets {key} of the policy '{name}', which no agent trains"
            advice = f"remove it, or set actor_rollout_ref.{key} for all of them"
            yield Finding(("dag.policies", _AGENTS), what, advice)


def several_policies(config: Config) -> Findings:
    """What a run whose agents have several policies cannot do yet."""
    group = config.actor_rollout_ref
    engine = ROLLOUT_ENGINES.get(group.rollout.name)
    if not has_several_policies(config):
        return

    if config.dag.policy is not None:
        yield _impossible("dag.policy", "train one of them alone", "null")
    if is_sharded(config):
        yield _impossible(f"{ACTOR}.strategy", "shard weights", "torch")
    if group.model.lora_rank:
        yield _impossible(f"{MODEL}.lora_rank", "train adapters", "0")
    if engine is not None and engine.in_server:
        yield _impossible(f"{ROLLOUT}.name", "generate in a server", "embedded")
    if estimator_of(config).needs_critic:
        yield _impossible(ADV_ESTIMATOR, "train a critic", "grpo")

    if config.algorithm.recompute_old_log_probs == "false":
        what = "take the rollout's log-probs as the old ones"
        yield _impossible("algorithm.recompute_old_log_probs", what, "auto")

    if group.actor.prox != "recompute":
        yield _impossible(f"{ACTOR}.prox", "interpolate proximal log-probs", "recompute")


def _impossible(key: str, what: str, default: str) -> Finding:
    why = f"a run whose agents have several policies cannot {what} yet"
    return Finding((key, _AGENTS), why, f"set {key} to {default}")


RULES = (
    trained_agents,
    agent_rewards,
    known_policy,
    served_policies,
    used_policies,
    settings_of_policies,
    several_policies,
)
