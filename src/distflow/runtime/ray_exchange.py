"""The exchange as an actor of Ray: it sees metadata and references alone. It loads no torch: it starts at once."""

import asyncio
from collections.abc import Callable, Sequence

import ray
from ray import ObjectRef

from distflow.flow.exchange import Exchange, Key, Metas, Readers, Select, Share


@ray.remote(num_cpus=0)
class ExchangeActor:
    """Drives the state machine on Ray's asyncio loop: who must wait costs no thread, and nobody polls.

    Each wait ends with its condition, with `timeout_s` (TimeoutError; None is for ever) or with `fail`. limit_bytes:
    see `Exchange`.
    """

    def __init__(self, limit_bytes: int, timeout_s: float | None = None) -> None:
        self._exchange: Exchange[ObjectRef] = Exchange(limit_bytes)
        self._timeout_s = timeout_s
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()

    async def reserve(self, key: Key, writer: int, num_writers: int, num_bytes: int) -> None:
        """Waits until there is room."""
        await self._until(
            lambda: self._exchange.reserve(key, writer, num_writers, num_bytes),
            lambda: (
                f"writer {writer} found no room for {num_bytes:,} bytes of {key}: {self._exchange.held_bytes:,} are "
                "held, of steps that have not been read"
            ),
        )

    async def put(self, key: Key, writer: int, metas: Metas, ref: Sequence[ObjectRef]) -> None:
        """Of a writer that has reserved room. ref: one, in a list: Ray would replace a bare one by its object."""
        self._exchange.put(key, writer, metas, ref[0])
        await self._wake()

    async def put_at_once(
        self, key: Key, writer: int, num_writers: int, num_bytes: int, metas: Metas, ref: Sequence[ObjectRef]
    ) -> None:
        """Of one that has not, because it is little that lies there while he waits for room."""
        await self.reserve(key, writer, num_writers, num_bytes)
        await self.put(key, writer, metas, ref)

    async def take(self, key: Key, rank: int, readers: Readers, select: Select | None) -> Share[ObjectRef]:
        """Waits until the step is complete."""
        await self._until(
            lambda: self._exchange.missing(key) is None,
            lambda: f"rank {rank} has waited for {key}: {self._exchange.missing(key)}",
        )
        return self._exchange.take(key, rank, readers, select)

    async def pick(self, key: Key, rank: int, num_ranks: int, uids: Sequence[str]) -> Share[ObjectRef]:
        """Waits until the step is complete."""
        await self._until(
            lambda: self._exchange.missing(key) is None,
            lambda: f"rank {rank} has waited for {key}: {self._exchange.missing(key)}",
        )
        return self._exchange.pick(key, num_ranks, uids)

    async def release(self, key: Key, rank: int) -> None:
        self._exchange.release(key, rank)
        await self._wake()

    async def alive(self) -> None:
        """Answered whatever waits."""

    async def held_bytes(self) -> int:
        return self._exchange.held_bytes

    async def fail(self, failure: BaseException) -> None:
        """Raised on whoever waits or comes from here on. The first one counts; later ones follow from it."""
        self._failure = self._failure or failure
        await self._wake()

    async def _until(self, holds: Callable[[], bool], problem: Callable[[], str]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._changed:
                while self._failure is None and not holds():
                    await self._changed.wait()
        except TimeoutError as late:
            raise TimeoutError(f"not within {self._timeout_s:g} s: {problem()}") from late
        if self._failure is not None:
            raise self._failure

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
