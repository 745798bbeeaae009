"""Rules of dynamic sampling, which drops groups without a learning signal."""

from distflow.builtin_names import FILTER_METRICS
from distflow.config.derived_settings import (
    algorithms,
    filters_groups,
    is_rl,
    reward_functions,
    unfiltered_domains,
)
from distflow.config.keys.schema import Config
from distflow.config.rules import ROLLOUT, Finding, Findings
from distflow.config.rules.estimator import has_several_rewards

_FILTER = "algorithm.filter_groups"


def filters(config: Config) -> bool:
    """Whether groups are generated and filtered."""
    return is_rl(config) and filters_groups(config)


def single_samples(config: Config) -> Findings:
    """A filtered group has several samples."""
    is_on = config.algorithm.filter_groups.enable and filters(config)
    if is_on and config.actor_rollout_ref.rollout.n == 1:
        yield Finding(
            ("algorithm.filter_groups.enable", f"{ROLLOUT}.n"),
            "a group has only one sample, so every group would be dropped",
            f"set {ROLLOUT}.n=8, or algorithm.filter_groups.enable=false",
        )


def several_rewards(config: Config) -> Findings:
    """The filter compares whole episodes, so advantages are of these, unless a function decides."""
    if not filters(config) or config.algorithm.filter_groups.should_accept is not None:
        return
    for domain, algorithm in algorithms(config):
        if domain in unfiltered_domains(config) or not has_several_rewards(algorithm):
            continue
        of_domain = f"data.domains.{domain}.filter_groups"
        key = of_domain if domain else "algorithm.filter_groups.enable"
        group = f"algorithm.domains.{domain}" if domain else "algorithm"
        yield Finding(
            (key, f"{group}.adv_estimator"),
            "a group with equal scores may teach by the rewards of its turns or agents, and would "
            "be dropped",
            f"set {key}=false, or algorithm.filter_groups.should_accept",
        )


def mean_range(config: Config) -> Findings:
    """A share of correct responses lies strictly between 0 and 1 if the group has a signal."""
    settings = config.algorithm.filter_groups
    if not filters(config) or settings.metric != "acc" or not settings.mean_range:
        return
    low, high = settings.mean_range
    if low >= 1 or high <= 0:
        what = "no share of correct responses other than 0 or 1 is between them"
        yield Finding(
            ("algorithm.filter_groups.mean_range", "algorithm.filter_groups.metric"),
            what,
            "set [0.1, 0.9]",
        )


def known_metric(config: Config) -> Findings:
    """The filter compares a score that exists."""
    metric = config.algorithm.filter_groups.metric
    names = {part.name for parts in reward_functions(config).values() for part in parts}
    if filters(config) and metric not in {*FILTER_METRICS, *names}:
        yield Finding(
            ("algorithm.filter_groups.metric", "reward.functions"),
            f"no reward function is called '{metric}'",
            f"set it to {' or '.join(FILTER_METRICS)}, or to one of {', '.join(sorted(names))}",
        )


RULES = (single_samples, several_rewards, mean_range, known_metric)
