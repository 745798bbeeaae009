"""What keys mean together: each rule looks at the whole config and yields what cannot work."""

from collections.abc import Callable, Iterator

from distflow.config.rules import (
    advantages,
    algorithm,
    data,
    devices,
    domains,
    domains_algorithm,
    engines,
    program,
    rewards,
    run,
    sharding,
)
from distflow.config.rules.finding import Finding
from distflow.config.rules.sizes import SIZE_RULES
from distflow.config.schema import Config

RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    *program.RULES,
    *data.RULES,
    *domains.RULES,
    *engines.RULES,
    *sharding.RULES,
    *advantages.RULES,
    *algorithm.RULES,
    *domains_algorithm.RULES,
    *rewards.RULES,
    *run.RULES,
    *devices.RULES,
)

__all__ = ["RULES", "SIZE_RULES", "Finding"]
