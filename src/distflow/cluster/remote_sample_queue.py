"""The sample queue for a worker in a separate process: a client of the coordinator actor. Groups
are plain buffers of their columns. They are in Ray's object store, and the coordinator has
references to them; without Ray it has the groups themselves."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from distflow.cluster.peer import Peer
from distflow.cluster.remote_calls import future_of, reply
from distflow.data.batch import Batch
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.observe.writing.timing import RANKS, Waits
from distflow.rewards.reward_results import RewardCounts
from distflow.runtime import fault_injection
from distflow.runtime.sample_queue.protocol import (
    AbortedGroups,
    DroppedGroup,
    EndedGroups,
    FinishedGroup,
    LoadedGroups,
    NewWorkers,
    Released,
    ResumePoint,
    TrainingStep,
)
from distflow.runtime.sample_queue.queue_base import joined
from distflow.runtime.stop_signals import Stop
from distflow.scheduling.group_states import PromptGroup

GroupRef = Any
"""Ray's reference to a group's buffers, in a tuple so that Ray does not pass the object; without
Ray, the buffers."""


Taken = TrainingStep[Sequence[GroupRef]]
"""A step as the coordinator hands it out."""


class GroupLost(RuntimeError):
    """A group is gone with the process that held it in memory."""


def to_group(batch: Batch, by_ray: bool) -> tuple[GroupRef, int]:
    """Store the group's columns, with Ray in memory that every process of this machine reads
    without a copy. Also returns their size."""
    buffers = to_buffers(batch)
    num_bytes = sum(column.nbytes for column in buffers.values())
    if not by_ray:
        return buffers, num_bytes

    import ray

    return (ray.put(buffers),), num_bytes


@dataclass(frozen=True)
class RowsOfGroup:
    """A group that is stored together with others. data: of all of them, as `GroupRef`."""

    data: GroupRef
    rows: range

    @staticmethod
    def of(group: FinishedGroup[GroupRef]) -> "GroupRef | RowsOfGroup":
        """Where the samples of a group are, as what `to_batch` reads."""
        if group.rows is None:
            return group.data
        return RowsOfGroup(group.data, group.rows)


def _fetched(groups: Sequence[GroupRef]) -> Sequence[Buffers]:
    """Raises GroupLost."""
    if not isinstance(groups[0], tuple):
        return groups

    import ray
    from ray.exceptions import ObjectLostError

    try:
        return ray.get([group[0] for group in groups])
    except ObjectLostError as err:
        raise GroupLost("a worker that held prompt groups has died") from err


def to_batch(groups: Sequence[GroupRef | RowsOfGroup]) -> Batch:
    """The rows of the groups in order. Raises GroupLost."""
    data = [group.data if isinstance(group, RowsOfGroup) else group for group in groups]
    distinct = {id(each): each for each in data}
    part_of = {each: part for part, each in enumerate(distinct)}
    parts = _fetched(list(distinct.values()))

    picks = []
    for group, stored in zip(groups, data, strict=True):
        part = part_of[id(stored)]
        if isinstance(group, RowsOfGroup):
            rows = group.rows
        else:
            rows = range(parts[part]["lengths.prompt"].size // 8)
        picks += [(part, row) for row in rows]

    return gather(parts, picks)


class RemoteSampleQueue:
    """The `SampleQueuePort` of a worker. It calls the coordinator actor, and moves the groups from
    worker to worker."""

    def __init__(
        self,
        coordinator: Any,
        worker: int,
        first: int,
        waits: Waits,
        stop: Stop,
        ready: "Future[None] | None" = None,
        wait: Callable[[Any], Any] = reply,
        read: Callable[[Taken, Sequence[GroupRef]], tuple[Batch | None, list[int]]] | None = None,
    ) -> None:
        """coordinator: the actor's handle, or a `Peer` that has it. worker: this one's number among
        the rollout workers. first: the number of the first rank of its dp group. ready: set when
        its engine has weights, before which it requests no groups; None if it has them from the
        start. stop: becomes wanted on all ranks at the release of the same step. wait: gets the
        coordinator's reply. read: reads the groups of a step, with the result of
        `read_groups`; None for rows in this process."""
        self._coordinator = coordinator
        self._worker = worker
        self._first = first
        self._waits = waits
        self._stop = stop
        self._ready = ready
        self._reply = wait
        self._read = read or _read_here
        self._by_ray = not isinstance(coordinator, Peer)
        self._reward_counts = RewardCounts()  # sent with the groups that end next
        self._reference_ahead: tuple[GroupRef, int] = (None, 0)
        """The batch that was stored last, until its groups are put, and its size."""
        self._batch_ahead: Batch | None = None

    async def prompt_groups(
        self, engine_version: Callable[[], int | None]
    ) -> AsyncIterator[list[PromptGroup]]:
        if self._ready is not None:
            with self._waits("rollout", "weights", on="training"):
                await asyncio.wrap_future(self._ready)

        while True:
            asked = self._coordinator.wait_for_groups.remote(self._worker, engine_version())
            with self._waits("rollout", "capacity", on="coordinator"):
                prompt_groups = await asyncio.wrap_future(future_of(asked))
            if prompt_groups is None:
                return
            if prompt_groups:
                yield prompt_groups

    def end_groups(self, ended: EndedGroups[Batch]) -> None:
        reward_counts = self._reward_counts
        self._reward_counts = RewardCounts()
        self._coordinator.end.remote(self._stored(ended), reward_counts)

    def store_ahead(self, batch: Batch) -> None:
        self._reference_ahead = to_group(batch, self._by_ray)
        self._batch_ahead = batch

    def count(self, reward_counts: RewardCounts) -> None:
        """Send the counts with the next group, since the actor may run two calls in any order."""
        self._reward_counts = RewardCounts.joined([self._reward_counts, reward_counts])

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> TrainingStep[Batch] | NewWorkers | None:
        """See `SampleQueuePort`; groups that were lost with a worker are generated again."""
        while True:
            timeout_s = None
            if deadline is not None:
                timeout_s = deadline - time.monotonic()

            with self._waits("training", f"step {step + 1}", on="rollout"):
                taken = self._reply(
                    self._coordinator.take.remote(step, self._first + rank, wanted, timeout_s)
                )

            if taken is None or isinstance(taken, NewWorkers):
                return taken

            fault_injection.reach("queue.taken")
            batch, lost = self._read(taken, taken.batch)
            report = self._coordinator.read.remote(step, self._first + rank, lost)

            if self._by_ray:
                with self._waits("training", f"step {step + 1}", on=RANKS):
                    whole = self._reply(report)
            else:
                whole = True  # the coordinator has the groups themselves

            if whole:
                assert batch is not None, "no group of it is lost"
                return joined(taken, batch)

    def release(self, step: int, rank: int, sent_weights: bool) -> Released:
        fault_injection.reach("release")
        with self._waits("training", f"release of step {step + 1}", on=RANKS):
            released: Released = reply(
                self._coordinator.release.remote(step, self._first + rank, sent_weights)
            )

        self._stop.wanted = released.stopping
        return released

    def note_training(self, step: int) -> None:
        """The coordinator has learned it from `read`."""

    def end_run(self, why: str) -> None:
        reply(self._coordinator.end_run.remote(why))

    def resume_point(self) -> ResumePoint[Batch]:
        point: ResumePoint[GroupRef] = reply(self._coordinator.resume_point.remote())
        queued = dict[int, FinishedGroup[Batch]]()
        for number, group in point.queued.items():
            with suppress(GroupLost):  # a resumed run generates it again
                batch = to_batch([RowsOfGroup.of(group)])
                queued[number] = replace(group.stored_as(batch), rows=None)

        return ResumePoint(point.snapshot, queued)

    def _stored(self, ended: EndedGroups[Batch]) -> EndedGroups[GroupRef]:
        """With references to the samples, if there are some."""
        if isinstance(ended, DroppedGroup | AbortedGroups):
            return ended

        fault_injection.reach("queue.put")
        if isinstance(ended, FinishedGroup):
            reference, num_bytes = to_group(ended.data, self._by_ray)
            return replace(ended, num_bytes=num_bytes).stored_as(reference)

        if ended.data is not self._batch_ahead:
            self.store_ahead(ended.data)
        reference, num_bytes = self._reference_ahead
        self._batch_ahead = None
        self._reference_ahead = (None, 0)

        return LoadedGroups(ended.prompt_groups, reference, ended.num_tokens, num_bytes)


def _read_here(taken: Taken, groups: Sequence[GroupRef]) -> tuple[Batch | None, list[int]]:
    return read_groups(taken.own or taken.group_ids[:1], groups)


def read_groups(
    numbers: Sequence[int], groups: Sequence[GroupRef | RowsOfGroup]
) -> tuple[Batch | None, list[int]]:
    """The rows of the groups, or the ids of lost groups. numbers: their ids."""
    with suppress(GroupLost):
        return to_batch(groups), []

    lost = []
    for number, group in zip(numbers, groups, strict=True):
        try:
            to_batch([group])
        except GroupLost:
            lost.append(number)

    return (None, lost) if lost else (to_batch(groups), [])  # a fetch may have been too slow before
