"""The sample queue within one process, between the asyncio thread that fills it and the threads
that train from it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby

from distflow.data.batch import Batch
from distflow.runtime.sample_queue.protocol import (
    FinishedGroup,
    NewWorkers,
    ResumePoint,
    TrainingStep,
)
from distflow.runtime.sample_queue.queue_base import SharedSampleQueue, joined
from distflow.scheduling.group_states import PromptGroup


class LocalSampleQueue(SharedSampleQueue[Batch]):
    """A `SampleQueuePort` that stores groups as batches.

    `prompt_groups`, `put` and `drop` are called on the asyncio thread, which must not block: it
    holds the lock only while the coordinator decides, and an event of its loop wakes it.
    """

    # Set by `prompt_groups` before its first read of what the lock guards, so that it sees any
    # change made while there was no loop to wake.
    _loop: asyncio.AbstractEventLoop | None = None
    _loop_thread: int | None = None
    _event: asyncio.Event  # the loop's: other threads set it only through `_wake_loop`

    async def prompt_groups(
        self, engine_version: Callable[[], int | None]
    ) -> AsyncIterator[list[PromptGroup]]:
        self._event = asyncio.Event()
        self._loop_thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

        while True:
            self._event.clear()  # before reading, so that later wakes are not lost
            prompt_groups = self.groups_for(0, engine_version())
            if prompt_groups is None:
                return
            if prompt_groups:
                yield prompt_groups
                continue

            with self._waits("rollout", "capacity", on="training"):
                await self._event.wait()

    def resume_point(self) -> ResumePoint[Batch]:
        point = super().resume_point()
        queued = {
            number: replace(group, data=_own(group), rows=None)
            for number, group in point.queued.items()
        }
        return replace(point, queued=queued)

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> TrainingStep[Batch] | None:
        taken = self.take_step(step, rank, wanted, deadline)
        assert not isinstance(taken, NewWorkers), (
            "the engine of one process is there from the start"
        )
        if taken is None:
            return None

        first, *others = taken.batch

        return joined(taken, Batch.concat([first, *others]) if others else first.copy())

    def store_ahead(self, batch: Batch) -> None:
        """Batches are stored as they are."""

    def note_training(self, step: int) -> None:
        with self._lock:
            self._taken_step = step
            if self._coordinator.plan.loads_rows:
                self._wake()

    def _data_of(self, groups: Sequence[FinishedGroup[Batch]]) -> Sequence[Batch]:
        """The groups' samples; those of neighbours that were loaded together in one batch."""
        found = []
        for _, together in groupby(groups, key=lambda group: id(group.data)):
            own = list(together)
            if own[0].rows is None:
                found += [group.data for group in own]
                continue

            rows = list(chain.from_iterable(group.rows or () for group in own))
            batch = own[0].data
            if rows != list(range(len(batch))):
                batch = batch.select(rows)
            found.append(batch)

        return found

    def _wake_loop(self) -> None:
        """Have `prompt_groups` check again; from any thread."""
        if threading.get_ident() == self._loop_thread:
            self._event.set()
        elif self._loop is not None:
            with suppress(RuntimeError):  # it is closed, maybe only now by its thread
                self._loop.call_soon_threadsafe(self._event.set)


def _own(group: FinishedGroup[Batch]) -> Batch:
    if group.rows is None:
        return group.data
    return group.data.select(group.rows)
