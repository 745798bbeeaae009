"""The asyncio thread of a worker with its services and its rollout engine: entered together, left together."""

import concurrent.futures
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from distflow.data.prompts import PromptRow
from distflow.rewards.certify import certify, certify_answers
from distflow.runtime.loop_thread import LoopThread
from distflow.runtime.resources import Resources

T = TypeVar("T")


class Session:
    """A context manager. While it is entered, coroutines run on its thread.

    certify_on: rows whose answers the verifiers are tried on before they are used; None trusts them.
    """

    def __init__(self, resources: Resources, certify_on: Sequence[PromptRow] | None) -> None:
        self._resources, self._certify_on = resources, certify_on
        self._thread = LoopThread("experience")
        self._stack = AsyncExitStack()

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

    async def _enter(self) -> None:
        judge, rollout = self._resources.judge, self._resources.rollout
        if judge is not None:
            self._stack.enter_context(judge)
            if self._certify_on is not None:
                await certify(judge)
                rows = [(row.domain, row.ground_truth, row.extra_info or {}) for row in self._certify_on]
                await certify_answers(judge, rows)
        if rollout is not None:
            await self._stack.enter_async_context(rollout)  # type: ignore[arg-type]  # the protocol says so in words
