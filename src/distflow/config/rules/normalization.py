"""Rules of how rewards and advantages are scaled: one normalisation at a time, and each with an effect."""

from collections.abc import Iterator

from distflow.config.derived_settings import find_estimator, find_pipeline, is_rl
from distflow.config.domain_settings import reward_functions
from distflow.config.keys.algorithm import is_on
from distflow.config.keys.schema import Config
from distflow.config.rules import ROLLOUT, Finding
from distflow.config.serialize import changed_from_default, flatten

_ESTIMATOR = "algorithm.adv_estimator"
_REWARD_NORM, _ADV_NORM = "algorithm.reward_norm", "algorithm.adv_norm"
_OF_SUMS = tuple(f"algorithm.{name}" for name in ("reward_shift", "reward_scale", "reward_clip", "whiten_rewards"))


def scaling(config: Config) -> Iterator[Finding]:
    """`scale_rewards` agrees with `norm_adv_by_std_in_grpo`, and a batch scales differences that are not all 0."""
    algorithm = config.algorithm
    if algorithm.scale_rewards in ("group", "batch") and not algorithm.norm_adv_by_std_in_grpo:
        yield Finding(
            ("algorithm.scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
            f"one divides by the standard deviation of the {algorithm.scale_rewards}, the other does not divide",
            "keep one of them and remove the other",
        )
    if algorithm.scale_rewards == "batch" and config.actor_rollout_ref.rollout.n == 1:
        what = "the only sample of a group is its own mean: every advantage would be 0"
        yield Finding(("algorithm.scale_rewards", f"{ROLLOUT}.n"), what, f"set {ROLLOUT}.n=8, or remove it")


def normalisations(config: Config) -> Iterator[Finding]:
    """Groups of a normalisation are made of the samples of a prompt, of which there are several."""
    size = config.actor_rollout_ref.rollout.n
    for name, norm in ((_REWARD_NORM, config.algorithm.reward_norm), (_ADV_NORM, config.algorithm.adv_norm)):
        key = f"{name}.group_size"
        if norm.group_size is None:
            continue
        if "group" not in (norm.mean_level, norm.std_level):
            advice = f"set {name}.mean_level=group, or remove it"
            yield Finding((key, f"{name}.mean_level"), "nothing is normalised within groups", advice)
        if size % norm.group_size:
            what = f"{size} samples of a prompt do not divide into groups of {norm.group_size}"
            yield Finding((key, f"{ROLLOUT}.n"), what, "remove it: a group is then all samples of a prompt")
    norm = config.algorithm.reward_norm
    if "group" in (norm.mean_level, norm.std_level) and size == 1 and is_rl(config):
        yield Finding(
            (f"{ROLLOUT}.n", f"{_REWARD_NORM}.{'mean' if norm.mean_level == 'group' else 'std'}_level"),
            "rewards are compared within a prompt, but there is only one sample of each",
            f"set {ROLLOUT}.n=8, or the levels of {_REWARD_NORM} to batch",
        )


def running_moments(config: Config) -> Iterator[Finding]:
    """Running moments are of rewards, not of advantages."""
    for name in ("mean_level", "std_level"):
        if getattr(config.algorithm.adv_norm, name) == "running":
            yield Finding(
                (f"{_ADV_NORM}.{name}",),
                "running moments are only for rewards: advantages of older policies are not comparable",
                f"set {_ADV_NORM}.{name}=batch, or {_REWARD_NORM}.{name}=running",
            )


def one_normalisation(config: Config) -> Iterator[Finding]:
    """What an estimator normalises itself is not normalised a second time."""
    estimator, name = find_estimator(config), config.algorithm.adv_estimator
    if estimator is None:
        return
    if is_on(config.algorithm.reward_norm) and (estimator.needs_group or name == "remax"):
        yield Finding(
            (f"{_REWARD_NORM}.{'mean' if config.algorithm.reward_norm.mean_level else 'std'}_level", _ESTIMATOR),
            f"{name} compares raw rewards",
            f"set {_ESTIMATOR}=reinforce (with gamma=1 every token gets the normalised reward), or gae, "
            f"or remove {_REWARD_NORM}",
        )
    if config.algorithm.whiten_rewards and (estimator.needs_group or name == "remax") and not estimator.reads_parts:
        yield Finding(
            ("algorithm.whiten_rewards", _ESTIMATOR),
            f"{name} compares rewards of whole responses, and whitening tokens would shift them by response length",
            f"set {_ESTIMATOR}=reinforce or gae, or remove algorithm.whiten_rewards",
        )
    if is_on(config.algorithm.adv_norm) and estimator.whitens:
        what = f"{name} already whitens its advantages over the batch"
        yield Finding(
            (f"{_ADV_NORM}.{'mean' if config.algorithm.adv_norm.mean_level else 'std'}_level", _ESTIMATOR),
            what,
            f"set {_ESTIMATOR}=reinforce, or remove {_ADV_NORM}",
        )


def parts_of_rewards(config: Config) -> Iterator[Finding]:
    """An estimator that reads the parts of the reward has several, and no key that changes only their sum is set."""
    estimator, name = find_estimator(config), config.algorithm.adv_estimator
    if estimator is None or not estimator.reads_parts:
        return
    what = f"{name} reads the parts of the reward, not their sum"
    for key in changed_from_default(flatten(config), _OF_SUMS):
        yield Finding((key, _ESTIMATOR), what, f"set {_ESTIMATOR}=grpo, or remove it")
    if isinstance(config.reward.on_error, float):
        yield Finding(
            ("reward.on_error", _ESTIMATOR), f"{what}, but a fixed score has no parts", "set it to mask or drop"
        )
    if config.algorithm.use_kl_in_reward:
        advice = "set actor_rollout_ref.actor.use_kl_loss=true instead"
        yield Finding(("algorithm.use_kl_in_reward", _ESTIMATOR), f"{what}, which has the KL", advice)
    parts = max(map(len, reward_functions(config).values()), default=0) + (config.reward.overlong.buffer_tokens > 0)
    if parts < 2 and find_pipeline(config) is not None:
        yield Finding(
            (_ESTIMATOR, "reward.functions"),
            f"{name} normalises each part of the reward, but there is only one",
            f"set {_ESTIMATOR}=grpo, or a second reward function, "
            "e.g. reward.functions={default: [math, {name: format, weight: 0.2}]}",
        )


RULES = (scaling, normalisations, running_moments, one_normalisation, parts_of_rewards)
