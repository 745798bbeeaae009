"""Rules of dynamic sampling, which drops groups without a learning signal."""

from distflow.builtin_names import FILTER_METRICS
from distflow.config.derived_settings import (
    algorithms,
    filters_groups,
    is_rl,
    reward_parts,
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
    if not filters(config):
        return

    common = config.actor_rollout_ref.rollout.n
    sizes = {f"{ROLLOUT}.n": common if not config.data.domains else 0}
    for name, domain in config.data.domains.items():
        if name not in unfiltered_domains(config):
            sizes[f"data.domains.{name}.n" if domain.n else f"{ROLLOUT}.n"] = domain.n or common

    for key, size in sizes.items():
        if size == 1:
            yield Finding(
                (key, "algorithm.filter_groups.enable"),
                "a group has only one sample, so every group would be dropped",
                f"set {key}=8, or filter no groups",
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


def known_metric(config: Config) -> Findings:
    """The filter compares a score that exists."""
    metric = config.algorithm.filter_groups.metric
    names = {part.name for part in reward_parts(config)}
    if filters(config) and metric not in {*FILTER_METRICS, *names}:
        yield Finding(
            ("algorithm.filter_groups.metric", "reward.functions"),
            f"no reward function is called '{metric}'",
            f"set it to {' or '.join(FILTER_METRICS)}, or to one of {', '.join(sorted(names))}",
        )


RULES = (single_samples, several_rewards, known_metric)
