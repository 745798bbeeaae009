"""The sample queue as a worker in a process of its own sees it: a client of the coordinator actor. Groups lie in Ray's
object store, as plain buffers of their columns; the coordinator has references to them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from distflow.cluster.actor_calls import reply, shortened
from distflow.data.batch import Batch
from distflow.data.buffers import from_buffers, gather, to_buffers
from distflow.observe.metrics import Measured
from distflow.rewards.call_counts import RewardCounts
from distflow.runtime import fault_injection
from distflow.runtime.sample_queue.local import facts_of, live_of
from distflow.runtime.sample_queue.pending_groups import Consumed, PendingGroup, Portion
from distflow.runtime.sample_queue.protocol import Failure, NewWorkers, Released, ResumePoint, Share
from distflow.runtime.wait_log import Waits
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import PromptGroup
from distflow.scheduling.snapshot import Snapshot

GroupRef = tuple["ray.ObjectRef[Any]"]
"""Of a group's buffers; in a tuple, so that Ray passes the reference and not the object."""


class GroupLost(RuntimeError):
    """A group is gone with the process that held it in memory."""


@dataclass(frozen=True)
class Page:
    """A part of the state that a checkpoint resumes from. cut: with the groups of this page alone. more: another page
    follows."""

    cut: Snapshot
    live: Mapping[int, PendingGroup[GroupRef]]
    more: bool


def to_group(batch: Batch) -> tuple[GroupRef, int]:
    """Store the group's columns where every process of this machine reads them without a copy; returns their size."""
    buffers = to_buffers(batch)
    return (ray.put(buffers),), sum(column.nbytes for column in buffers.values())


def to_batch(groups: Sequence[GroupRef], like: GroupRef) -> Batch:
    """The rows of the groups in order. like: a group that has the columns, where there are no groups. Raises
    GroupLost."""
    try:
        if not groups:
            return from_buffers(ray.get(like[0])).select([])
        parts = ray.get([group[0] for group in groups])
    except ObjectLostError as err:
        raise GroupLost("a worker that held prompt groups has died") from err
    rows = [(part, row) for part, buffers in enumerate(parts) for row in range(buffers["lengths.prompt"].size // 8)]
    return gather(parts, rows)


def lost_among(groups: Mapping[int, GroupRef]) -> list[int]:
    """Those that cannot be read any more."""
    lost = []
    for number, group in groups.items():
        try:
            ray.get(group[0])
        except ObjectLostError:
            lost.append(number)
    return lost


class AgreedStop:
    """A `Stop` that all ranks get with the release of the same step."""

    wanted = False


class RaySampleQueue:
    """Calls the coordinator actor, and moves the groups themselves from worker to worker."""

    def __init__(
        self,
        coordinator: Any,
        worker: int,
        first: int,
        waits: Waits,
        stop: AgreedStop,
        ready: "Future[None] | None" = None,
    ) -> None:
        """coordinator: the actor's handle. worker: this one's number among the rollout workers. first: the number of
        the first rank of its dp group. ready: set when its engine has weights, before which it asks for no group; None
        where it has them from the start."""
        self._coordinator, self._worker, self._first, self._waits = coordinator, worker, first, waits
        self._stop, self._ready = stop, ready
        self._reward_counts = RewardCounts()  # of groups that end next

    async def prompt_groups(self, lowest_version: Callable[[], int | None]) -> AsyncIterator[list[PromptGroup]]:
        """See `SampleQueuePort`."""
        if self._ready is not None:
            with self._waits("rollout", "weights", on="training"):
                await asyncio.wrap_future(self._ready)
        while True:
            asked = self._coordinator.wait_for_groups.remote(self._worker, lowest_version())
            with self._waits("rollout", "capacity", on="coordinator"):
                prompt_groups = await asyncio.wrap_future(asked.future())
            if prompt_groups is None:
                return
            if prompt_groups:
                yield prompt_groups

    def put(self, prompt_group: PromptGroup, batch: Batch, measured: Sequence[Measured]) -> None:
        """See `SampleQueuePort`."""
        fault_injection.reach("queue.put")
        facts, (group, num_bytes) = facts_of(batch), to_group(batch)
        facts = replace(facts, failure=_shortened(facts.failure), num_bytes=num_bytes)
        self._coordinator.put.remote(prompt_group, group, facts, list(measured), self._take_reward_counts())

    def drop(
        self,
        prompt_group: PromptGroup,
        reason: str,
        failure: Failure | None = None,
        *,
        lost: bool = False,
        accuracy: Accuracy | None = None,
    ) -> None:
        """See `SampleQueuePort`."""
        facts = shortened(reason), _shortened(failure), lost, accuracy, self._take_reward_counts()
        self._coordinator.drop.remote(prompt_group, *facts)

    def count(self, judged: RewardCounts) -> None:
        """See `SampleQueuePort`. It is sent with the next group: the actor may run two calls in any order."""
        calls = judged.calls._replace(first=shortened(judged.calls.first))
        self._reward_counts = RewardCounts.joined([self._reward_counts, judged._replace(calls=calls)])

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> Share | NewWorkers | None:
        """See `SampleQueuePort`; whole steps only. Groups that were lost with a worker are generated again."""
        assert wanted is None and deadline is None, "a user's own loop runs in one process"
        while True:
            with self._waits("training", f"step {step}", on="rollout"):
                portion = reply(self._coordinator.take.remote(step, self._first + rank))
            if portion is None or isinstance(portion, NewWorkers):
                return portion
            groups = [*portion.groups]
            while more := reply(self._coordinator.rest.remote(self._first + rank)):
                groups += more
            fault_injection.reach("queue.taken")
            batch, lost = _read(portion, groups)
            with self._waits("training", f"step {step}", on="other ranks"):
                whole = reply(self._coordinator.read.remote(step, self._first + rank, lost))
            if whole:
                assert batch is not None, "no group of it is lost"
                return Share(portion.group_ids, batch, portion.metrics, portion.judged)

    def release(self, step: int, rank: int, weights_sent: bool) -> Released:
        """See `SampleQueuePort`."""
        fault_injection.reach("release")
        with self._waits("training", f"release of step {step}", on="other ranks"):
            end: Consumed[GroupRef] = reply(self._coordinator.release.remote(step, self._first + rank, weights_sent))
        self._stop.wanted = end.stopping
        return Released(end.version, end.finished, end.group_counts, self._checkpoint_state, end.domains)

    def _take_reward_counts(self) -> RewardCounts:
        judged, self._reward_counts = self._reward_counts, RewardCounts()
        return judged

    def _checkpoint_state(self) -> ResumePoint:
        pages: list[Page] = [reply(self._coordinator.checkpoint_page.remote(0))]
        while pages[-1].more:
            pages.append(reply(self._coordinator.checkpoint_page.remote(len(pages))))
        cut = pages[0].cut
        cut["live"] = [group for page in pages for group in page.cut["live"]]
        live = {}
        for number, each in ((number, each) for page in pages for number, each in page.live.items()):
            with suppress(GroupLost):  # a resumed run generates it again
                live[number] = PendingGroup(to_batch([each.group], each.group), each.num_tokens, each.measured)
        return ResumePoint(cut, live_of(live))


def _read(portion: Portion[GroupRef], groups: Sequence[GroupRef]) -> tuple[Batch | None, list[int]]:
    """The rows of the groups, or the groups that are lost; for a portion without groups, the step's first."""
    try:
        return to_batch(groups, portion.like), []
    except GroupLost:
        by_id = dict(zip(portion.own, groups, strict=True)) or {portion.group_ids[0]: portion.like}
        return None, lost_among(by_id)


def _shortened(failure: Failure | None) -> Failure | None:
    return None if failure is None else replace(failure, message=shortened(failure.message))
