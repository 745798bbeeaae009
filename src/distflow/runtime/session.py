"""The asyncio thread of a run with its services and its rollout engine: entered together, left together."""

import concurrent.futures
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from distflow.flow.ticket import Version
from distflow.rewards.certify import certify, certify_answers
from distflow.runtime.checks.canary import Canary
from distflow.runtime.loop_thread import LoopThread
from distflow.runtime.parts import Parts
from distflow.runtime.weight_edge import WeightEdge

T = TypeVar("T")


class Session:
    """A context manager. While it is entered, coroutines run on its thread, and weights can be published."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._thread = LoopThread("experience")
        self._stack = AsyncExitStack()
        self._weights, self._canary = _weight_edge(parts)

    def __enter__(self) -> "Session":
        self._thread.__enter__()
        try:
            self._thread.call(self._enter())
        except BaseException as err:
            self.__exit__(type(err), err)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        """Cancel what runs, then leave the services. Their failure to end is told only where nothing failed before."""
        try:
            self._thread.cancel_all()
            self._thread.call(self._stack.aclose())
        except Exception:
            if error is None:
                raise
        finally:
            self._thread.__exit__()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end on the session's thread."""
        return self._thread.call(work)

    def start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Begin on the session's thread and return at once."""
        return self._thread.start(work)

    def publish(self, version: Version, at_start: bool = False) -> dict[str, float]:
        """Send the trainer's weights, and compare the canary's answers where its turn has come. Raises TrustError."""
        if self._weights is None or self._canary is None:
            return {}
        self.call(self._weights.publish(version))
        if not self._canary.is_due(at_start):
            return {}
        return self._canary.compare(self.call(self._canary.answer()), at_start)

    async def _enter(self) -> None:
        parts = self._parts
        if parts.rewards is not None:
            self._stack.enter_context(parts.rewards)
            if parts.config.trust.certify_rewards:
                await certify(parts.rewards)
                await certify_answers(parts.rewards, _some_answers(parts))
        if parts.engines.rollout is not None:
            await self._stack.enter_async_context(parts.engines.rollout)  # type: ignore[arg-type]


def _some_answers(parts: Parts) -> list[tuple[str, Any, dict[str, Any]]]:
    return [(row.domain, row.ground_truth, row.extra_info or {}) for row in parts.train_rows[:16]]


def _weight_edge(parts: Parts) -> tuple[WeightEdge | None, Canary | None]:
    actor, rollout = parts.engines.actor, parts.engines.rollout
    if rollout is None:
        return None, None
    prompts = [tuple(row.prompt_ids) for row in parts.train_rows[: Canary.NUM_PROMPTS]]
    frequency = parts.config.trust.canary_freq
    canary = Canary(rollout, actor, prompts, parts.sampling, parts.tolerance, frequency, parts.shares_weights)
    return WeightEdge(parts.published, rollout, parts.weight_dtype), canary
