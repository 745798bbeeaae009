"""A quick start of runs: reward processes start while torch is imported, without the garbage
collector."""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.config import Config


@contextmanager
def rewards_ahead(config: "Config") -> Iterator[None]:
    """Meanwhile load the reward functions that a built-in pipeline will use; a
    custom one may use none.

    Raises UserError for an unknown reward.
    """
    from distflow.config.derived_settings import find_pipeline
    from distflow.rewards.pool.domain_pools import RewardSettings, pool_settings, started_early

    pipeline = find_pipeline(config)
    with ExitStack() as stack:
        if pipeline is not None and pipeline.generates:
            for each in pool_settings(RewardSettings.of(config)).values():
                stack.enter_context(started_early(each))
        yield


@contextmanager
def importing() -> Iterator[None]:
    """Imports torch without the garbage collector, which would repeatedly scan all imported
    objects: an eighth of the time. The objects are frozen, so that later collections skip them."""
    if "torch" in sys.modules:
        yield
        return

    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
