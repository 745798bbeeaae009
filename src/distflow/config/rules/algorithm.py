"""Rules of the algorithm: the KL controller, clips, rollout correction, dynamic sampling, and
scaling of rewards and advantages: one normalisation at a time, each with an effect."""

from collections.abc import Iterator

from distflow.builtin_names import FILTER_METRICS
from distflow.config.derived_settings import (
    algorithms,
    filters_groups,
    is_rl,
    reward_functions,
    unfiltered_domains,
)
from distflow.config.keys.algorithm import AlgorithmConfig, spread
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, ROLLOUT, Finding

_CORRECTION = "algorithm.rollout_correction"


def corrections(config: Config) -> Iterator[Finding]:
    """The band of importance weights is not empty, and only one correction weighs."""
    correction = config.algorithm.rollout_correction
    threshold = correction.rollout_is_threshold
    if correction.rollout_is is None:
        return
    if isinstance(threshold, tuple) and not 0 <= threshold[0] < threshold[1]:
        yield Finding(
            (f"{_CORRECTION}.rollout_is_threshold",),
            f"no weight lies between {threshold[0]:g} and {threshold[1]:g}",
            "set the lower bound to 0 or more and below the upper one, e.g. [0.5, 2.0]",
        )
    own = {"behav_imp_weight_cap", "behav_imp_weight_mode", "rejection_sampling"}
    for name in sorted(own & set(config.actor_rollout_ref.actor.policy_loss_kwargs)):
        yield Finding(
            (f"{_CORRECTION}.rollout_is", f"{ACTOR}.policy_loss_kwargs.{name}"),
            "the rollout correction and the decoupled loss would both apply the weights",
            (
                f"set {_CORRECTION}.rollout_is=null, or remove {name}: rollout_is and "
                "rollout_is_threshold replace it"
            ),
        )


def rejection(config: Config) -> Iterator[Finding]:
    """Every rejection statistic has a valid bound, and its mismatch can be measured."""
    correction = config.algorithm.rollout_correction
    names = correction.rollout_rs
    bounds = correction.rollout_rs_threshold
    both = (f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs")
    if bool(names) != bool(bounds):
        what = (
            "a rejection needs a bound" if names else "it is the bound of a rejection that is off"
        )
        yield Finding(
            both, what, f"set {both[1]}=token_k1 and {both[0]}=[[0.5, 2.0]], or remove both"
        )
        return
    if len(set(names)) < len(names):
        yield Finding(both[1:], "a statistic is named twice", "name it once")
    if len(bounds) not in (1, len(names)) and names:
        yield Finding(
            both,
            f"{len(bounds)} bounds for {len(names)} statistics",
            "set one for each, or one for all",
        )
        return
    for name, (lower, upper) in zip(names, spread(bounds, len(names)), strict=True):
        is_ratio = name.endswith("k1")
        if lower is not None and not is_ratio:
            yield Finding(
                both,
                f"{name} is never negative and has no lower bound",
                f"write {upper:g} alone for it",
            )
        elif upper <= 0 or (lower is not None and not 0 < lower <= upper):
            yield Finding(
                both,
                f"the bounds of {name} exclude everything",
                "write e.g. [0.5, 2.0], both above 0",
            )
        elif is_ratio and lower is None and upper < 1:
            what = f"nothing lies between 1/{upper:g} and {upper:g}, the bounds of {name}"
            yield Finding(both, what, "set 1 or more")


def dynamic_sampling(config: Config) -> Iterator[Finding]:
    """A filter compares several samples of a group by an existing score, and advantages are not per
    turn."""
    filters = config.algorithm.filter_groups
    if not filters_groups(config) or not is_rl(config):
        return
    for domain, algorithm in algorithms(config) if filters.should_accept is None else ():
        if has_several_rewards(algorithm) and domain not in unfiltered_domains(config):
            key = (
                f"data.domains.{domain}.filter_groups"
                if domain
                else "algorithm.filter_groups.enable"
            )
            what = (
                "a group with equal scores may teach by the rewards of its turns or agents, and "
                "would be dropped"
            )
            estimator = (
                f"algorithm.domains.{domain}.adv_estimator" if domain else "algorithm.adv_estimator"
            )
            yield Finding(
                (key, estimator), what, f"set {key}=false, or algorithm.filter_groups.should_accept"
            )
    if (
        filters.metric == "acc"
        and filters.mean_range
        and (filters.mean_range[0] >= 1 or filters.mean_range[1] <= 0)
    ):
        what = "no share of correct responses other than 0 or 1 is between them"
        yield Finding(
            ("algorithm.filter_groups.mean_range", "algorithm.filter_groups.metric"),
            what,
            "set [0.1, 0.9]",
        )
    names = {part.name for parts in reward_functions(config).values() for part in parts}
    if filters.metric not in {*FILTER_METRICS, *names}:
        yield Finding(
            ("algorithm.filter_groups.metric", "reward.functions"),
            f"no reward function is called '{filters.metric}'",
            f"set it to {' or '.join(FILTER_METRICS)}, or to one of {', '.join(sorted(names))}",
        )


def normalised_groups(config: Config) -> Iterator[Finding]:
    """The samples of a prompt divide into the groups of a normalisation."""
    samples = config.actor_rollout_ref.rollout.n
    for name, norm in (
        ("reward_norm", config.algorithm.reward_norm),
        ("adv_norm", config.algorithm.adv_norm),
    ):
        if norm.group_size is not None and samples % norm.group_size:
            what = f"{samples} samples of a prompt do not divide into groups of {norm.group_size}"
            advice = "remove it: a group is then all samples of a prompt"
            yield Finding((f"algorithm.{name}.group_size", f"{ROLLOUT}.n"), what, advice)


def has_several_rewards(algorithm: AlgorithmConfig) -> bool:
    """Whether the turns or agents of an episode have separate advantages."""
    over_turns = algorithm.adv_estimator in (
        "grpo_turns",
        "gae_marft",
    ) or algorithm.adv_estimator_kwargs.get("over_turns")
    return bool(over_turns) or algorithm.agent_rewards != "shared"


def samples_of_decisions(config: Config) -> Iterator[Finding]:
    """If samples are decisions, no correction is of whole episodes."""
    settings = config.algorithm.rollout_correction
    key = "algorithm.sample_level"
    for name, own in (
        ("rollout_is", (settings.rollout_is or "token",)),
        ("rollout_rs", settings.rollout_rs),
    ):
        wide = [each for each in own if not each.startswith("token")]
        if wide and config.algorithm.sample_level == "decision":
            what = f"{wide[0]} is of whole episodes, and samples are decisions"
            yield Finding(
                (f"{_CORRECTION}.{name}", key),
                what,
                f"use a statistic of tokens, or set {key}=episode",
            )


RULES = (normalised_groups, corrections, rejection, dynamic_sampling, samples_of_decisions)
