"""Reward workers that are started early: their processes load functions while the run imports torch."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from distflow.errors import UserError
from distflow.rewards.pool.pool import MEMORY_BYTES, START_TIMEOUT_S, RewardPool


class PoolSettings(NamedTuple):
    """Arguments of a `RewardPool`."""

    functions: Mapping[str, str]
    num_workers: int
    timeout_s: float
    memory_bytes: int = MEMORY_BYTES
    start_timeout_s: float = START_TIMEOUT_S

    def start(self) -> RewardPool:
        """Raises UserError if a function cannot be loaded."""
        return RewardPool(**self._asdict())


_started: list[tuple[PoolSettings, "Future[RewardPool]"]] = []


@contextmanager
def started_ahead(settings: PoolSettings) -> Iterator[None]:
    """Start that pool in the background, for the first `take_pool` inside; one that is not taken is closed."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="distflow-ahead")
    _started.append((settings, thread.submit(settings.start)))
    try:
        yield
    finally:
        pool = _take(settings)
        if pool is not None:
            pool.close()
        thread.shutdown()


def take_pool(settings: PoolSettings) -> RewardPool:
    """The pool of these settings that was started ahead, or a new one; to be closed by the caller.

    Raises UserError if a function cannot be loaded.
    """
    return _take(settings) or settings.start()


def _take(settings: PoolSettings) -> RewardPool | None:
    entry = next((entry for entry in _started if entry[0] == settings), None)
    if entry is None:
        return None
    _started.remove(entry)
    try:
        return entry[1].result()
    except UserError:  # an import may have registered what was missing; else the next attempt raises the same
        return None
