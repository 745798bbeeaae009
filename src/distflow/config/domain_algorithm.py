"""How the rewards of a domain become advantages, where `algorithm.domains` has it otherwise than `algorithm`."""

from collections.abc import Iterator
from dataclasses import replace

from distflow.config.algorithm import AlgorithmConfig
from distflow.config.differing import changed
from distflow.config.names import ESTIMATORS
from distflow.config.schema import Config
from distflow.config.watch import peek, with_group


def algorithm_of(config: Config, domain: str | None) -> AlgorithmConfig:
    """Of that domain; that of the run for None, and where the domain has no settings of its own."""
    own = config.algorithm.domains.get(domain) if domain is not None else None
    return config.algorithm if own is None else replace(changed(peek(config.algorithm), own), domains={})


def algorithms(config: Config) -> Iterator[tuple[str | None, AlgorithmConfig]]:
    """By domain, that of the run first."""
    for domain in (None, *config.algorithm.domains):
        yield domain, algorithm_of(config, domain)


def config_of(config: Config, domain: str | None) -> Config:
    """The run's config as that domain has it. Its keys that are read count as those of the run."""
    own = with_group(config, "algorithm", replace(peek(algorithm_of(config, domain)), domains={}))
    size = None if domain not in config.data.domains else config.data.domains[domain].n
    if size is None:
        return own
    actor = peek(own.actor_rollout_ref)
    return with_group(own, "actor_rollout_ref", replace(actor, rollout=replace(actor.rollout, n=size)))


def takes_values(algorithm: AlgorithmConfig) -> bool:
    """Whether its estimator needs a critic."""
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    return estimator is not None and estimator.needs_critic
