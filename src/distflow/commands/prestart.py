"""Starts reward processes while torch is imported, and speeds up that import."""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from distflow.config import Config
from distflow.config.derived_settings import find_pipeline
from distflow.rewards.pool.domain_pools import RewardSettings, pool_settings, started_early
from distflow.rewards.self_check import self_check_once


@contextmanager
def rewards_ahead(config: Config) -> Iterator[None]:
    """Load and self-check meanwhile the reward functions that a built-in pipeline will use; a user's may use none.

    Raises UserError for an unknown reward.
    """
    pipeline = find_pipeline(config)
    with ExitStack() as stack:
        if pipeline is not None and pipeline.generates:
            for each in pool_settings(RewardSettings.of(config)).values():
                stack.enter_context(started_early(each))
            if config.trust.check_rewards:
                self_check_once()
        yield


@contextmanager
def importing() -> Iterator[None]:
    """Imports torch without the garbage collector, which would scan all imported objects again and again: an eighth of
    the time. The objects are frozen, so that later collections skip them."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
