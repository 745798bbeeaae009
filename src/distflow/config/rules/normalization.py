"""Rules of how rewards and advantages are scaled: one normalisation at a time, and all of its options used."""

from collections.abc import Iterator

from distflow.config.derived_settings import find_estimator, find_pipeline, is_rl
from distflow.config.keys.algorithm import NormConfig, is_on
from distflow.config.keys.schema import Config
from distflow.config.per_domain import reward_functions
from distflow.config.rules import ROLLOUT, Finding
from distflow.config.serialize import changed_from_default

_REWARD_NORM, _ADV_NORM = "algorithm.reward_norm", "algorithm.adv_norm"
_OF_SUMS = tuple(f"algorithm.{name}" for name in ("reward_shift", "reward_scale", "reward_clip", "whiten_rewards"))


def scaling(config: Config) -> Iterator[Finding]:
    """`scale_rewards` and `norm_adv_by_std_in_grpo` say the same, and a batch scales differences that there are."""
    algorithm = config.algorithm
    if algorithm.scale_rewards in ("group", "batch") and not algorithm.norm_adv_by_std_in_grpo:
        yield Finding(
            ("algorithm.scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
            f"one divides by the standard deviation of the {algorithm.scale_rewards}, the other by none",
            "keep one of them and remove the other",
        )
    if algorithm.scale_rewards == "batch" and config.actor_rollout_ref.rollout.n == 1:
        yield Finding(
            ("algorithm.scale_rewards", f"{ROLLOUT}.n"),
            "the only sample of a group is its own mean: every advantage would be 0",
            f"set {ROLLOUT}.n=8, or remove it",
        )


def normalisations(config: Config) -> Iterator[Finding]:
    """Every option of a normalisation does something."""
    for name, norm in ((_REWARD_NORM, config.algorithm.reward_norm), (_ADV_NORM, config.algorithm.adv_norm)):
        yield from _idle_options(name, norm)
        if norm.group_size is not None and config.actor_rollout_ref.rollout.n % norm.group_size:
            yield Finding(
                (f"{name}.group_size", f"{ROLLOUT}.n"),
                f"{config.actor_rollout_ref.rollout.n} samples of a prompt are not made of groups of {norm.group_size}",
                "remove it: a group is the samples of a prompt",
            )
    norm = config.algorithm.reward_norm
    if "group" in (norm.mean_level, norm.std_level) and config.actor_rollout_ref.rollout.n == 1 and is_rl(config):
        yield Finding(
            (f"{ROLLOUT}.n", f"{_REWARD_NORM}.mean_level"),
            "rewards are compared within a prompt, and there is only one sample of each",
            f"set {ROLLOUT}.n=8, or the levels of {_REWARD_NORM} to batch",
        )


def running_moments(config: Config) -> Iterator[Finding]:
    """Advantages are compared with those of their own step."""
    norm = config.algorithm.adv_norm
    for name, level in (("mean_level", norm.mean_level), ("std_level", norm.std_level)):
        if level == "running":
            yield Finding(
                (f"{_ADV_NORM}.{name}",),
                "running moments are of rewards: advantages of older policies say nothing of this one's",
                f"set {_ADV_NORM}.{name}=batch, or {_REWARD_NORM}.{name}=running",
            )


def _idle_options(name: str, norm: NormConfig) -> Iterator[Finding]:
    default, levels = NormConfig(), (norm.mean_level, norm.std_level)
    needs = (
        ("mean_leave1out", norm.mean_level is not None, "mean_level", "no mean is taken off"),
        ("std_unbiased", norm.std_level is not None, "std_level", "no standard deviation divides"),
        ("eps", norm.std_level is not None, "std_level", "no standard deviation divides"),
        ("group_size", "group" in levels, "mean_level", "nothing is normalised within groups"),
    )
    for option, used, level, why in needs:
        if not used and getattr(norm, option) != getattr(default, option):
            yield Finding(
                (f"{name}.{option}", f"{name}.{level}"), why, f"set {name}.{level}=group (or batch), or remove it"
            )


def one_normalisation(config: Config) -> Iterator[Finding]:
    """What an estimator normalises by itself is not normalised before or after it as well."""
    estimator, name = find_estimator(config), config.algorithm.adv_estimator
    if estimator is None:
        return
    if is_on(config.algorithm.reward_norm) and (estimator.needs_group or name == "remax"):
        yield Finding(
            (f"{_REWARD_NORM}.mean_level", "algorithm.adv_estimator"),
            f"{name} compares rewards as they were given",
            "set algorithm.adv_estimator=reinforce (with gamma=1 every token gets the normalised reward), or gae, "
            f"or remove {_REWARD_NORM}",
        )
    if config.algorithm.whiten_rewards and (estimator.needs_group or name == "remax") and not estimator.reads_parts:
        yield Finding(
            ("algorithm.whiten_rewards", "algorithm.adv_estimator"),
            f"{name} compares the rewards of whole answers, and those of tokens would be moved by each answer's length",
            "set algorithm.adv_estimator=reinforce or gae, or remove algorithm.whiten_rewards",
        )
    if is_on(config.algorithm.adv_norm) and estimator.whitens:
        yield Finding(
            (f"{_ADV_NORM}.mean_level", "algorithm.adv_estimator"),
            f"{name} whitens its advantages over the batch already",
            f"set algorithm.adv_estimator=reinforce, or remove {_ADV_NORM}",
        )


def parts_of_rewards(config: Config) -> Iterator[Finding]:
    """An estimator of parts needs several, and sees nothing that was done to their sum."""
    estimator, name = find_estimator(config), config.algorithm.adv_estimator
    if estimator is None or not estimator.reads_parts:
        return
    for key, _, _ in changed_from_default(config, _OF_SUMS):
        yield Finding(
            (key, "algorithm.adv_estimator"),
            f"{name} reads the parts of the reward, not their sum",
            "set algorithm.adv_estimator=grpo, or remove it",
        )
    if isinstance(config.reward.on_error, float):
        yield Finding(
            ("reward.on_error", "algorithm.adv_estimator"),
            f"{name} reads the parts of the reward, and a score that is given has none",
            "set reward.on_error=mask or drop",
        )
    if config.algorithm.use_kl_in_reward:
        yield Finding(
            ("algorithm.use_kl_in_reward", "algorithm.adv_estimator"),
            f"{name} reads the parts of the reward, from which no KL is taken off",
            "set actor_rollout_ref.actor.use_kl_loss=true instead",
        )
    parts = max(map(len, reward_functions(config).values()), default=0) + (config.reward.overlong.buffer_tokens > 0)
    if parts < 2 and find_pipeline(config) is not None:
        yield Finding(
            ("algorithm.adv_estimator", "reward.functions"),
            f"{name} normalises the parts of a reward apart, and there is only one",
            "set algorithm.adv_estimator=grpo, or a second reward function, "
            "e.g. reward.functions={default: [math, {name: format, weight: 0.2}]}",
        )


RULES = (scaling, normalisations, running_moments, one_normalisation, parts_of_rewards)
