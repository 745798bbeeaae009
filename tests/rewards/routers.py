"""A reward router from keyword arguments, as tests write them."""

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.config.keys.reward import RewardPart
from distflow.rewards.pool.domain_pools import Patience, Pools, RewardSettings
from distflow.rewards.pool.pool import RewardPool
from distflow.rewards.router import RewardRouter

PATIENCE = ("timeout_s", "num_workers", "retries", "backoff_s", "give_up_after")
SETTINGS = ("domains", "custom")


def make_router(functions: Mapping[str, Sequence[tuple]], **arguments: Any) -> RewardRouter:
    patience = Patience(**{name: arguments.pop(name) for name in PATIENCE if name in arguments})
    settings = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
    parts = {
        domain: tuple(RewardPart(*part) for part in each) for domain, each in functions.items()
    }
    return RewardRouter(RewardSettings(parts, patience, **settings), **arguments)


def pids_of(pools: RewardPool | Pools) -> list[int]:
    """Of the processes that run now."""
    found = pools._pools.values() if isinstance(pools, Pools) else [pools]
    return sorted(process.pid for pool in found for process in getattr(pool, "_living", ()))
