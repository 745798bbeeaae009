"""A reward router from keyword arguments, as tests write them."""

from typing import Any

from distflow.rewards.functions import Functions
from distflow.rewards.pool.domain_pools import Patience, RewardSettings
from distflow.rewards.router import RewardRouter

PATIENCE = ("timeout_s", "num_workers", "retries", "backoff_s")
SETTINGS = ("domains", "custom", "memory_bytes")


def make_router(functions: Functions, **arguments: Any) -> RewardRouter:
    patience = Patience(**{name: arguments.pop(name) for name in PATIENCE if name in arguments})
    settings = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
    return RewardRouter(RewardSettings(functions, patience, **settings), **arguments)
