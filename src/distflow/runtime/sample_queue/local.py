"""The sample queue of one process: between the asyncio thread that fills it and the threads that train from it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from distflow.data.batch import Batch
from distflow.observe.metrics import Measured
from distflow.rewards.score import RewardCounts, is_right
from distflow.runtime.sample_queue.pending_groups import DpGroupShares, Facts, PendingGroup, Portion
from distflow.runtime.sample_queue.protocol import Failure, Live, NewWorkers, Released, ResumePoint, Share
from distflow.runtime.sample_queue.shared import SharedSampleQueue
from distflow.runtime.wait_log import Waits
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup


class LocalSampleQueue:
    """Stores groups as batches. See `SharedSampleQueue` for what it decides.

    `prompt_groups`, `put` and `drop` are called on the asyncio thread, which must not block: it holds the lock only
    while the coordinator decides, and is woken through an event of its loop.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        waits: Waits,
        num_ranks: int = 1,
        live: Live | None = None,
        changed: Callable[[GroupCounts], None] = lambda group_counts: None,
    ) -> None:
        """See `SharedSampleQueue`."""
        held = pending_groups_of(live)
        dp_groups = (DpGroupShares(tuple(range(num_ranks))),)
        self.shared = SharedSampleQueue[Batch](
            coordinator, waits, dp_groups, live=held, changed=changed, wake=self._wake
        )
        self._waits = waits
        # Set by `prompt_groups` before it first reads what the lock guards: a change that finds no loop to wake was
        # made in time to be seen.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()  # an event of the loop: other threads set it through `_wake` alone

    async def prompt_groups(self, served: Callable[[], int | None]) -> AsyncIterator[list[PromptGroup]]:
        """See `SampleQueuePort`."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()  # before it reads: a wake from here on is not lost
            prompt_groups = self.shared.prompt_groups(0, served())
            if prompt_groups is None:
                return
            if prompt_groups:
                yield prompt_groups
                continue
            with self._waits("rollout", "capacity", on="training"):
                await self._changed.wait()

    def put(self, prompt_group: PromptGroup, batch: Batch, measured: Sequence[Measured]) -> None:
        """See `SampleQueuePort`."""
        self.shared.put(prompt_group, batch, facts_of(batch), measured)

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
        self.shared.drop(prompt_group, reason, failure, lost=lost, accuracy=accuracy)

    def has_place(self, prompt_group: PromptGroup) -> bool:
        """See `StoppingSampleQueue`."""
        return self.shared.has_place(prompt_group)

    def is_full(self) -> bool:
        """See `StoppingSampleQueue`."""
        return self.shared.is_full()

    def abort(self, prompt_groups: Sequence[PromptGroup], num_tokens: int) -> None:
        """See `StoppingSampleQueue`."""
        self.shared.abort(prompt_groups, num_tokens)

    def count(self, judged: RewardCounts) -> None:
        """See `SampleQueuePort`."""
        self.shared.count(judged)

    def take(self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None) -> Share | None:
        """See `SampleQueuePort`."""
        portion = self.shared.take(step, rank, wanted, deadline)
        assert not isinstance(portion, NewWorkers), "the engine of one process is there from the start"
        return None if portion is None else share_of(portion)

    def release(self, step: int, rank: int, published: bool) -> Released:
        """See `SampleQueuePort`."""
        end = self.shared.release(step, rank, published)
        return Released(
            end.version, end.finished, end.group_counts, lambda: ResumePoint(end.cut, live_of(end.live)), end.domains
        )

    def _wake(self) -> None:
        """Have `prompt_groups` check again; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)


def facts_of(batch: Batch) -> Facts:
    """Of a group."""
    num_tokens = int(batch.lengths("sequence").sum())
    return Facts(num_tokens, _lowest_version(batch), _failure_of(batch), accuracy=accuracy_of(batch))


def accuracy_of(batch: Batch) -> Accuracy | None:
    """Of a group's responses; None if they were not scored."""
    if "acc" not in batch:
        return None
    scored = batch["acc"][batch["valid"]].tolist()
    return Accuracy(sum(map(is_right, scored)), len(scored))


def pending_groups_of(live: Live | None) -> dict[int, PendingGroup[Batch]]:
    """By group id. The inverse of `live_of`."""
    if live is None or live.batch is None:
        return {}
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(live.batch["group_index"].tolist()):
        rows.setdefault(number, []).append(row)
    groups = {number: live.batch.select(own) for number, own in rows.items()}
    return {
        number: PendingGroup(group, int(group.lengths("sequence").sum()), live.measured.get(number, ()))
        for number, group in groups.items()
    }


def share_of(portion: Portion[Batch]) -> Share:
    """The groups in one batch; if there are none, an empty one with the columns of the step."""
    batch = Batch.concat(portion.groups) if portion.groups else portion.like.select([])
    return Share(portion.group_ids, batch, portion.metrics, portion.judged)


def live_of(held: Mapping[int, PendingGroup[Batch]]) -> Live:
    """For a checkpoint."""
    batch = Batch.concat([each.group for each in held.values()]) if held else None
    return Live(batch, {number: each.measured for number, each in held.items()})


def _failure_of(batch: Batch) -> Failure | None:
    if "reward_errors" not in batch or bool(batch["valid"].any()):
        return None
    return Failure(str(batch["reward_errors"][0]), users=True)


def _lowest_version(batch: Batch) -> int | None:
    """Of the policy's tokens; None if there are none."""
    versions = batch.flat("versions")
    versions = versions[versions >= 0]
    return int(versions.min()) if len(versions) else None
