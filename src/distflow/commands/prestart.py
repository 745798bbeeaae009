"""What a command that runs a pipeline does while torch is imported, and how it imports it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from distflow.config import Config
from distflow.config.derived_settings import find_pipeline
from distflow.rewards.pool.domain_pools import pool_settings, verifiers_of
from distflow.rewards.pool.prestart import started_ahead
from distflow.rewards.self_check import self_check_once


@contextmanager
def verifiers_ahead(config: Config) -> Iterator[None]:
    """Have the verifiers that a built-in pipeline will ask for load and be tried meanwhile; a user's may ask for none.

    Raises UserError for a reward that there is not.
    """
    pipeline = find_pipeline(config)
    with ExitStack() as stack:
        if pipeline is not None and pipeline.generates:
            for each in pool_settings(*verifiers_of(config)).values():
                stack.enter_context(started_ahead(each))
            if config.trust.check_rewards:
                self_check_once()
        yield


@contextmanager
def importing() -> Iterator[None]:
    """Imports torch without the garbage collector, which would look through all that imports make ever again: an eighth
    of their time. What they made stays, and is left out of its later rounds."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
