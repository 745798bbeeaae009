"""Verifiers that are started before a run asks for them: their processes load while it imports torch."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from distflow.errors import UserError
from distflow.rewards.pool.pool import MEMORY_BYTES, START_TIMEOUT_S, RewardPool


class PoolSettings(NamedTuple):
    """What a pool is made of; see `RewardPool`."""

    functions: Mapping[str, str]
    num_workers: int
    timeout_s: float
    memory_bytes: int = MEMORY_BYTES
    start_timeout_s: float = START_TIMEOUT_S

    def start(self) -> RewardPool:
        """Raises UserError where a function cannot be loaded."""
        return RewardPool(**self._asdict())


_started: list[tuple[PoolSettings, "Future[RewardPool]"]] = []


@contextmanager
def started_ahead(settings: PoolSettings) -> Iterator[None]:
    """Start that pool in the background, for the first `take_pool` inside; one that nobody takes is closed."""
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
    """The pool of these settings that was started ahead, or a new one; to be closed by whoever took it.

    Raises UserError where a function cannot be loaded.
    """
    return _take(settings) or settings.start()


def _take(settings: PoolSettings) -> RewardPool | None:
    entry = next((entry for entry in _started if entry[0] == settings), None)
    if entry is None:
        return None
    _started.remove(entry)
    try:
        return entry[1].result()
    except UserError:  # the run may have imported what it lacked; else the next attempt says the same
        return None
