"""Resharding between dp groups: a worker's client of the coordinator, which matches writers and
readers.

A put is one object in the shared memory of the writer's node. A reader on the same node maps it and
copies its rows once.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError

from distflow.cluster.remote_calls import reply
from distflow.data.batch import Batch
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.observe.writing.timing import Waits
from distflow.scheduling.reshard_writers_to_readers import Key, ReshardError, Share


class RayReshard:
    """A worker's client, which puts and picks the batches of steps; each call waits until it is
    done."""

    def __init__(self, coordinator: Any, waits: Waits) -> None:
        self._coordinator = coordinator
        self._waits = waits

    def put(self, key: Key, batch: Batch, writer: int, num_writers: int) -> None:
        """See `ReshardPort`. Raises TypeError for an object that is not a JSON value, and
        ReshardError for an invalid step."""
        refs = [ray.put(to_buffers(batch))]
        _result(
            self._coordinator.put_share.remote(key, writer, num_writers, tuple(batch["uid"]), refs)
        )

    def pick(self, key: Key, rank: int, num_ranks: int, uids: Sequence[str]) -> Batch:
        """See `ReshardPort`. Waits until the step is complete, and copies its rows. Raises
        ReshardError if the step cannot be completed any more."""
        with self._waits("exchange", str(key), on="writers"):
            share: Share[ObjectRef] = _result(
                self._coordinator.pick_share.remote(key, num_ranks, uids)
            )

        try:
            parts: list[Buffers] = ray.get(list(share.refs))
        except ObjectLostError as lost:
            raise ReshardError(
                f"samples of {key} are lost, because one of their writers {list(share.writers)} "
                "has died"
            ) from lost

        batch = gather(parts, [(part, row) for part, row in share.rows.tolist()])
        self._coordinator.release_share.remote(key, rank)
        return batch


def _result(ref: ObjectRef) -> Any:
    """As `reply`, but raises ReshardError if the coordinator is gone."""
    try:
        return reply(ref)
    except RayActorError as gone:
        raise ReshardError(f"the coordinator has ended: {gone}") from gone
