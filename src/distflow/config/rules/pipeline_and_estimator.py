"""Rules of the pipeline: what selects it, and what it needs."""

from collections.abc import Iterator

from distflow.builtin_names import ESTIMATORS, PIPELINES, POLICY_LOSSES, REGISTERED, REWARDS
from distflow.config.compose.setting_origins import preset_names
from distflow.config.compose.typed_values import did_you_mean
from distflow.config.derived_settings import (
    ADV_ESTIMATOR,
    CUSTOM,
    POLICY_LOSS,
    named_rewards,
    pipeline_name,
    policies_of,
    policies_of_agents,
    trained_policies,
)
from distflow.config.keys.dag import FIRST_POLICY
from distflow.config.keys.schema import Config
from distflow.config.rules import MODEL, ROLLOUT, Finding
from distflow.import_target import is_pickled, split_name


def named_pipeline(config: Config) -> Iterator[Finding]:
    """`dag.pipeline` names a built-in pipeline or a function."""
    name = config.dag.pipeline
    if isinstance(name, str) and name not in PIPELINES and not _is_reference(name):
        meant = did_you_mean(name, PIPELINES, "dag.pipeline")
        advice = (
            f"{meant}built in are {', '.join(PIPELINES)}; write your own as module:function, "
            "file.py:function or a "
        )
        advice += "list of nodes"
        if name in preset_names():
            advice = f"{name} is a preset: write distflow train {name}, or defaults: [{name}]"
        yield Finding(
            ("dag.pipeline",), "is neither a built-in pipeline nor the name of a function", advice
        )


def known_names(config: Config) -> Iterator[Finding]:
    """A name that is not built in needs a module that registers it."""
    if config.trainer.imports or pipeline_name(config) == CUSTOM:
        return
    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss
    asked = [
        (ADV_ESTIMATOR, ADV_ESTIMATOR, estimator, (*ESTIMATORS, *REGISTERED)),
        (POLICY_LOSS, POLICY_LOSS, loss, (*POLICY_LOSSES, *REGISTERED)),
    ]
    for key, _, parts in named_rewards(config):
        asked += [(key, "reward.functions", part.name, tuple(REWARDS)) for part in parts]
    for key, kind, name, table in asked:
        if name not in table and ":" not in name:
            yield Finding(
                (key,),
                f"'{name}' is not a built-in name",
                f"{did_you_mean(name, table, kind)}built-in names are {', '.join(table)}; write "
                "your own function as "
                "file.py:function, or add the module that registers the name to trainer.imports",
            )


def known_policy(config: Config) -> Iterator[Finding]:
    """`dag.policy` is a policy of this config."""
    name = config.dag.policy
    known = policies_of(config)
    if name is not None and name not in known:
        advice = f"{did_you_mean(name, known)}there are {', '.join(known)}"
        yield Finding(("dag.policy", "dag.policies"), "is none of the policies", advice)


def agents_and_policies(config: Config) -> Iterator[Finding]:
    """Each agent has an existing policy, each policy an agent, and it sets what may differ."""
    agents = config.actor_rollout_ref.rollout.agents
    key = f"{ROLLOUT}.agents"
    policies = config.dag.policies
    known = policies_of(config)
    owners = policies_of_agents(config)
    for name, agent in agents.items():
        if agent.policy not in known:
            what = f"no engine serves the policy '{agent.policy}' of the agent '{name}'"
            example = f"dag.policies={{{agent.policy}: {{model: {{path: DIR}}}}}}"
            advice = f"{did_you_mean(agent.policy, known)}declare it, e.g. {example}"
            yield Finding((key, "dag.policies"), what, advice)
    if not owners or {*owners.values()} - {*known}:
        return
    if FIRST_POLICY not in trained_policies(config):
        what = f"no trained agent has the policy '{FIRST_POLICY}', which is the model of {MODEL}"
        yield Finding(
            (key, f"{MODEL}.path"),
            what,
            "exchange the models, so that this one is of a trained agent",
        )
    for name in policies:
        if name not in owners.values():
            yield Finding(
                ("dag.policies", key),
                f"no agent has the policy '{name}'",
                "remove it, or give it an agent",
            )
        for own in sorted({*policies[name]} - {"model.path", "model.init", "model.revision"}):
            is_optimizers = own.startswith("actor.optim.") or own == "actor.max_grad_norm"
            what = (
                f"sets {own} of the policy '{name}', but policies of agents differ in their models "
                "and optimizers alone"
            )
            if is_optimizers and name not in trained_policies(config):
                what = f"sets {own} of the policy '{name}', which no agent trains"
            if not is_optimizers or name not in trained_policies(config):
                yield Finding(
                    ("dag.policies", key),
                    what,
                    f"remove it, or set actor_rollout_ref.{own} for all of them",
                )


def _is_reference(text: str) -> bool:
    if text.endswith(".py") or is_pickled(text):
        return is_pickled(text)
    module, attribute = split_name(text)
    is_module = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return is_module and all(part.isidentifier() for part in attribute.split("."))


RULES = (named_pipeline, known_names, known_policy, agents_and_policies)
