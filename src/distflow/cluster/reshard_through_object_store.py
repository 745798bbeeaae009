"""Resharding between dp groups: a Ray actor that matches writers and readers, and a worker's client
of it.

A put is one object in the shared memory of the writer's node. A reader on the same node maps it and
copies its rows once. The actor handles only metadata and references.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError

from distflow.cluster.remote_calls import reply
from distflow.data.batch import Batch
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.observe.writing.timing import Waits
from distflow.scheduling.reshard_writers_to_readers import Key, Reshard, ReshardError, Share


@ray.remote(num_cpus=0)
class ReshardActor:
    """Drives the state machine on Ray's asyncio loop, so that waiting needs no thread and no
    polling. Each wait ends with its condition or with `fail`."""

    def __init__(self) -> None:
        self._exchange: Reshard[ObjectRef] = Reshard()
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()

    async def put(
        self,
        key: Key,
        writer: int,
        num_writers: int,
        uids: Sequence[str],
        ref: Sequence[ObjectRef],
    ) -> None:
        """ref: one, in a list: Ray would replace a bare one by its object."""
        if self._failure is not None:
            raise self._failure
        self._exchange.put(key, writer, num_writers, uids, ref[0])
        await self._wake()

    async def pick(self, key: Key, num_ranks: int, uids: Sequence[str]) -> Share[ObjectRef]:
        """Pick a share; waits until the step is complete."""
        await self._until(lambda: self._exchange.is_complete(key))
        return self._exchange.pick(key, num_ranks, uids)

    async def release(self, key: Key, rank: int) -> None:
        self._exchange.release(key, rank)

    async def alive(self) -> None:
        """A heartbeat."""

    async def fail(self, failure: BaseException) -> None:
        """Raise a failure in every waiting and later call. The first one counts; later ones follow
        from it."""
        self._failure = self._failure or failure
        await self._wake()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            while self._failure is None and not holds():
                await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class RayReshard:
    """A worker's client, which puts and picks the batches of steps; each call waits until it is
    done."""

    def __init__(self, actor: ActorHandle, waits: Waits) -> None:
        self._actor = actor
        self._waits = waits

    def put(self, key: Key, batch: Batch, writer: int, num_writers: int) -> None:
        """See `ReshardPort`. Raises TypeError for an object that is not a JSON value, and
        ReshardError for an invalid step."""
        refs = [ray.put(to_buffers(batch))]
        _result(self._actor.put.remote(key, writer, num_writers, tuple(batch["uid"]), refs))

    def pick(self, key: Key, rank: int, num_ranks: int, uids: Sequence[str]) -> Batch:
        """See `ReshardPort`. Waits until the step is complete, and copies its rows. Raises
        ReshardError if the step cannot be completed any more."""
        with self._waits("exchange", str(key), on="writers"):
            share: Share[ObjectRef] = _result(self._actor.pick.remote(key, num_ranks, uids))
        try:
            parts: list[Buffers] = ray.get(list(share.refs))
        except ObjectLostError as lost:
            raise ReshardError(
                f"samples of {key} are lost, because one of their writers {list(share.writers)} "
                "has died"
            ) from lost
        batch = gather(parts, [(part, row) for part, row in share.rows.tolist()])
        self._actor.release.remote(key, rank)
        return batch


def _result(ref: ObjectRef) -> Any:
    """As `reply`, but raises ReshardError if the actor is gone."""
    try:
        return reply(ref)
    except RayActorError as gone:
        raise ReshardError(f"the exchange has ended: {gone}") from gone
