"""Rules of rewards: reward functions, models that score, penalties, retries."""

from distflow.config.derived_settings import (
    is_rl,
    named_rewards,
    uses_custom_reward,
)
from distflow.config.keys.reward import on_error_of, scoring_models
from distflow.config.keys.schema import Config
from distflow.config.rules import ROLLOUT, Finding, Findings
from distflow.config.rules.estimator import scoring_key

_FUNCTIONS = "reward.functions"
_CUSTOM = "custom_reward_function.path"
_OVERLONG = "reward.overlong"


def has_functions(config: Config) -> Findings:
    """There is a reward."""
    if not config.reward.functions and not config.data.domains:
        advice = "set e.g. reward.functions.default=[math]"
        yield Finding((_FUNCTIONS,), "there is no reward", advice)


def custom_function(config: Config) -> Findings:
    """The user's own function is named, and used."""
    is_used = uses_custom_reward(config)
    path = config.custom_reward_function.path
    keys = (_CUSTOM, _FUNCTIONS)

    if is_used and path is None:
        advice = (
            "set custom_reward_function.path=my_reward.py (and .name, if it is not compute_score)"
        )
        yield Finding(keys, "the reward 'custom' has no function", advice)

    if not is_used and path is not None and is_rl(config):
        advice = "set reward.functions.default=[custom], or remove it"
        yield Finding(keys, "no domain uses the function", advice)


def names_of_models(config: Config) -> Findings:
    """A model that scores and a reward function have different names."""
    names = set[str]()
    for _, _, parts in named_rewards(config):
        names.update(part.name for part in parts)

    for name in sorted(names & scoring_models(config.reward_model).keys()):
        what = f"'{name}' is a reward function too"
        yield Finding((scoring_key(config), _FUNCTIONS), what, "choose another name")


def errors_of_judges(config: Config) -> Findings:
    """After an error of a judge no group is replaced."""
    models = scoring_models(config.reward_model)
    drops = "drop" in (on_error_of(config.reward, each) for each in ("", *config.reward.domains))
    if drops and any(model.judge for model in models.values()):
        what = "a judge's errors occur in the training loop, which cannot replace a group"
        advice = "set reward.on_error to mask or {score: x}"
        yield Finding((scoring_key(config), "reward.on_error"), what, advice)


def weights(config: Config) -> Findings:
    """The weights of reward functions are not all 0, unless a reward model scores too."""
    for key, domain, parts in named_rewards(config):
        is_zero = parts and all(part.weight == 0 for part in parts)
        if is_zero and not scoring_models(config.reward_model, domain):
            what = f"all weights of the domain '{domain}' are 0, so its score is always 0"
            yield Finding((key,), what, "give a reward function a weight")


def limit_penalty(config: Config) -> Findings:
    """The penalty of limits is of an episode with one score."""
    has_workflow = config.actor_rollout_ref.rollout.workflow is not None
    for name in ("max_turns", "length", "context"):
        key = f"reward.limit_penalty.{name}"
        if not getattr(config.reward.limit_penalty, name):
            continue

        if not has_workflow:
            advice = (
                "set reward.overlong.buffer_tokens and factor instead, which apply to single "
                "responses"
            )
            yield Finding((key, f"{ROLLOUT}.workflow"), "there is no workflow", advice)

        if config.algorithm.agent_rewards != "shared":
            what = "each agent has its own score, and the penalty is of the episode"
            advice = "subtract it in the workflow (chat.finish_reason)"
            yield Finding((key, "algorithm.agent_rewards"), what, advice)


def judges(config: Config) -> Findings:
    """A judge that is a reward function has a model."""
    advice = (
        "write {name: judge, options: {model: NAME, base_url: URL}}; without a URL it is one of "
        "OpenAI's"
    )

    for key, _, parts in named_rewards(config):
        if any(part.name == "judge" and not part.options.get("model") for part in parts):
            yield Finding((key,), "the judge has no model", advice)


RULES = (
    judges,
    has_functions,
    custom_function,
    names_of_models,
    errors_of_judges,
    weights,
    limit_penalty,
)
