"""The coordinator's side of resharding between dp groups. It handles only metadata and
references."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distflow.scheduling.reshard_writers_to_readers import Key, Reshard, Share

if TYPE_CHECKING:
    from ray import ObjectRef


class SharedReshard:
    """Each call runs on its own thread. A wait ends with its condition or with `fail`."""

    def __init__(self) -> None:
        self._reshard: Reshard[ObjectRef] = Reshard()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put_share(
        self,
        key: Key,
        writer: int,
        num_writers: int,
        uids: Sequence[str],
        ref: "Sequence[ObjectRef]",
    ) -> None:
        """ref: one, in a list: Ray would replace a bare one by its object."""
        with self._changed:
            self._check()
            self._reshard.put(key, writer, num_writers, uids, ref[0])
            self._changed.notify_all()

    def pick_share(self, key: Key, num_ranks: int, uids: Sequence[str]) -> "Share[ObjectRef]":
        """Pick a share; waits until the step is complete."""
        with self._changed:
            while self._failure is None and not self._reshard.is_complete(key):
                self._changed.wait()
            self._check()
            return self._reshard.pick(key, num_ranks, uids)

    def release_share(self, key: Key, rank: int) -> None:
        with self._changed:
            self._reshard.release(key, rank)

    def fail(self, failure: BaseException) -> None:
        """Raise a failure in every waiting and later call. The first one counts; later ones follow
        from it."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
