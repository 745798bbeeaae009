"""Rules of the pipeline: what selects it, and the names that it needs."""

from distflow.builtin_names import (
    ESTIMATORS,
    PIPELINES,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    REGISTERED,
    REWARDS,
)
from distflow.config.compose.setting_origins import pipeline_of_type, preset_names
from distflow.config.compose.typed_values import did_you_mean
from distflow.config.derived_settings import (
    ADV_ESTIMATOR,
    CUSTOM,
    POLICY_LOSS,
    PREFERENCE_LOSS,
    find_pipeline,
    named_rewards,
    pipeline_name,
    reads_labels,
)
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, Finding, Findings
from distflow.config.rules.estimator import pipeline_key
from distflow.import_target import is_pickled, split_name


def named_pipeline(config: Config) -> Findings:
    """`dag.pipeline` names a built-in pipeline or a function."""
    name = config.dag.pipeline
    if not isinstance(name, str) or name in PIPELINES or _is_reference(name):
        return

    advice = (
        f"{did_you_mean(name, PIPELINES, 'dag.pipeline')}built in are {', '.join(PIPELINES)}; "
        "write your own as module:function, file.py:function or a list of nodes"
    )
    if name in preset_names():
        advice = f"{name} is a preset: write distflow train {name}, or defaults: [{name}]"
    what = "is neither a built-in pipeline nor the name of a function"
    yield Finding(("dag.pipeline",), what, advice)


def known_names(config: Config) -> Findings:
    """A name that is not built in needs a module that registers it."""
    if config.trainer.imports or pipeline_name(config) == CUSTOM:
        return

    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss
    preference_loss = config.algorithm.preference_loss
    asked = [
        (ADV_ESTIMATOR, ADV_ESTIMATOR, estimator, (*ESTIMATORS, *REGISTERED)),
        (POLICY_LOSS, POLICY_LOSS, loss, (*POLICY_LOSSES, *REGISTERED)),
        (PREFERENCE_LOSS, PREFERENCE_LOSS, preference_loss, (*PREFERENCE_LOSSES, *REGISTERED)),
    ]
    for key, _, parts in named_rewards(config):
        asked += [(key, "reward.functions", part.name, tuple(REWARDS)) for part in parts]

    for key, kind, name, table in asked:
        if name not in table and ":" not in name:
            yield Finding(
                (key,),
                f"'{name}' is not a built-in name",
                f"{did_you_mean(name, table, kind)}built-in names are {', '.join(table)}; write "
                "your own function as file.py:function, or add the module that registers the name "
                "to trainer.imports",
            )


def selected_once(config: Config) -> Findings:
    """`algorithm.workflow_type` and `dag.pipeline` select the same pipeline."""
    kind = config.algorithm.workflow_type
    chosen = config.dag.pipeline

    pipeline = pipeline_of_type(kind) or chosen
    if chosen and chosen != pipeline and find_pipeline(config) is not None:
        yield Finding(
            ("algorithm.workflow_type", "dag.pipeline"),
            f"workflow_type={kind} selects the pipeline {pipeline}, but dag.pipeline selects "
            f"{chosen}",
            f"set algorithm.workflow_type=DEFAULT, or dag.pipeline={pipeline}",
        )


def unread_critic(config: Config) -> Findings:
    """The estimator reads the critic that the pipeline trains."""
    pipeline = find_pipeline(config)
    name = config.algorithm.adv_estimator
    if pipeline is None or not pipeline.has_critic or name not in ESTIMATORS:
        return

    if not ESTIMATORS[name].needs_critic:
        yield Finding(
            (ADV_ESTIMATOR, pipeline_key(config)),
            f"the pipeline {pipeline_name(config)} trains a critic that {name} does not read",
            "set algorithm.adv_estimator=gae, or dag.pipeline=grpo",
        )


def kto_of_one(config: Config) -> Findings:
    """A mini-batch of KTO has responses to other prompts."""
    actor = config.actor_rollout_ref.actor
    for key, size in (
        (f"{ACTOR}.ppo_mini_batch_size", actor.ppo_mini_batch_size),
        ("data.train_batch_size", config.data.train_batch_size),
    ):
        if reads_labels(config) and size < 2:
            yield Finding(
                (key,),
                "KTO's baseline compares each prompt with the response to another one of its "
                f"mini-batch, which has {size}",
                f"set {key}=8 or higher",
            )


def _is_reference(text: str) -> bool:
    if text.endswith(".py") or is_pickled(text):
        return is_pickled(text)
    module, attribute = split_name(text)
    is_module = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return is_module and all(part.isidentifier() for part in attribute.split("."))


RULES = (
    named_pipeline,
    known_names,
    selected_once,
    unread_critic,
    kto_of_one,
)
