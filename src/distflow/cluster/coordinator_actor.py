"""The coordinator as a Ray actor. It handles metadata and references alone; samples go from worker to worker."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from distflow.cluster.log_forwarding import Message, MessageQueue
from distflow.cluster.sample_queue import GroupRef, Page, to_group
from distflow.launch.run_setup import Start, begin_ledger
from distflow.observe.metrics import Measured
from distflow.planning.plan import dp_groups_of
from distflow.rewards.call_counts import RewardCounts
from distflow.runtime.checkpoint.state import load_live
from distflow.runtime.rank_info import queue_dp_group
from distflow.runtime.sample_queue.local import pending_groups_of
from distflow.runtime.sample_queue.pending_groups import Consumed, Facts, PendingGroup, Portion
from distflow.runtime.sample_queue.protocol import Failure, NewWorkers
from distflow.runtime.sample_queue.shared import SharedSampleQueue
from distflow.runtime.spec import Spec
from distflow.runtime.wait_log import Waits
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup, Version

_PAGE = 64
"""Groups in one reply: a reference has some 170 bytes, the measurements of a group some hundreds. No object of more
than 64 kB comes here or goes to the driver."""


class RunEnded(RuntimeError):
    """The run has ended, and no more groups are issued."""


@dataclass(frozen=True)
class Standing:
    """The progress of the run. total_steps: as far as the data last."""

    version: Version
    restart: int
    total_steps: int
    finished: bool
    group_counts: GroupCounts


class CoordinatorActor:
    """Each method call runs on a thread of its own, and may wait there. Methods without a docstring are those of
    `SharedSampleQueue`.

    A call that the worker does not wait for may fail here: then the run fails, and every worker is notified.
    """

    def __init__(self, spec: Spec, start: Start, allowed: tuple[str, ...]) -> None:
        """allowed: config keys that may differ from the checkpoint."""
        os.umask(0o077)
        self._coordinator, self._ledger = begin_ledger(spec, start.checkpoint, allowed)
        live = pending_groups_of(load_live(start.checkpoint)) if start.checkpoint else {}
        refs: dict[int, PendingGroup[GroupRef]] = {}
        for number, each in live.items():
            group, num_bytes = to_group(each.group)
            refs[number] = PendingGroup(group, each.num_tokens, each.measured)
            if self._coordinator.holds(number):
                self._coordinator.weigh(number, num_bytes)
        self._queue = SharedSampleQueue[GroupRef](
            self._coordinator,
            Waits(),
            [queue_dp_group(spec, dp_group) for dp_group in dp_groups_of(spec.plan)],
            [str(rank.rank) for rank in spec.plan.ranks if rank.rollout_nodes],
            live=refs,
            changed=self._show_queue,
            may_be_lost=True,
        )
        self._rests: dict[int, Sequence[GroupRef]] = {}  # of a step's groups, by rank
        self._consumed: Consumed[GroupRef] | None = None  # until the leading rank takes the next step
        self._messages = MessageQueue()

    def standing(self) -> Standing:
        coordinator = self._coordinator
        return Standing(
            coordinator.version,
            self._ledger.restart,
            coordinator.plan.total_steps,
            coordinator.finished,
            coordinator.checked_counts(),
        )

    def alive(self) -> None:
        """Replied to on a thread of its own."""

    def wait_for_groups(self, worker: int, lowest_version: int | None) -> list[PromptGroup] | None:
        return self._queue.wait_for_groups(worker, lowest_version)

    def put(
        self,
        prompt_group: PromptGroup,
        group: GroupRef,
        facts: Facts,
        measured: Sequence[Measured],
        reward_counts: RewardCounts,
    ) -> None:
        """reward_counts: by its worker since the group before it."""
        with self._failing():
            self._queue.count(reward_counts)
            self._queue.put(prompt_group, group, facts, measured)

    def drop(
        self,
        prompt_group: PromptGroup,
        reason: str,
        failure: Failure | None,
        lost: bool,
        accuracy: Accuracy | None,
        reward_counts: RewardCounts,
    ) -> None:
        """reward_counts: see `put`."""
        with self._failing():
            self._queue.count(reward_counts)
            self._queue.drop(prompt_group, reason, failure, lost=lost, accuracy=accuracy)

    def lose(self, worker: int) -> int:
        return self._queue.lose(worker)

    def join(self, name: str) -> int:
        return self._queue.join(name)

    def tell_of_new_workers(self) -> None:
        self._queue.tell_of_new_workers()

    def take(self, step: int, rank: int) -> Portion[GroupRef] | NewWorkers | None:
        """See `SampleQueuePort`. The first of its groups; `rest` has the others."""
        portion = self._queue.take(step, rank)
        if portion is None or isinstance(portion, NewWorkers):
            return portion
        if rank == 0:
            self._consumed = None
        self._rests[rank] = portion.groups[_PAGE:]
        return replace(portion, groups=portion.groups[:_PAGE])

    def rest(self, rank: int) -> Sequence[GroupRef]:
        """The next groups of the step that the rank has taken; empty once it has all."""
        found = self._rests[rank][:_PAGE]
        self._rests[rank] = self._rests[rank][_PAGE:]
        return found

    def read(self, step: int, rank: int, lost: Sequence[int]) -> bool:
        return self._queue.read(step, rank, lost)

    def release(self, step: int, rank: int, weights_sent: bool) -> Consumed[GroupRef]:
        """See `SampleQueuePort`. `checkpoint_page` returns the state that a checkpoint resumes from."""
        consumed = self._queue.release(step, rank, weights_sent)
        if rank == 0:
            self._consumed = consumed
        return replace(consumed, cut={**consumed.cut, "live": []}, live={})

    def checkpoint_page(self, page: int) -> Page:
        """Of the step released last, for the leading rank, before it takes the next one."""
        assert self._consumed is not None
        cut, live, here = self._consumed.cut, [*self._consumed.live.items()], slice(page * _PAGE, (page + 1) * _PAGE)
        return Page(
            {**cut, "live": cut["live"][here]}, dict(live[here]), max(len(live), len(cut["live"])) > (page + 1) * _PAGE
        )

    def stop(self) -> None:
        self._queue.stop()

    def fail(self, failure: BaseException) -> None:
        self._queue.fail(failure)

    def end(self) -> None:
        """No group is issued any more, and the ledger is complete."""
        self._queue.fail(RunEnded("the run has ended"))
        self._ledger.close()

    def add_message(self, sender: str, number: int, method: str, *arguments: Any) -> None:
        """See `MessageQueue.append_in_order`."""
        self._messages.append_in_order(sender, number, method, *arguments)

    def messages(self, timeout_s: float) -> list[Message]:
        """See `MessageQueue.fetch`."""
        return self._messages.fetch(timeout_s)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as err:  # nobody waits for the reply: whatever it is ends the run
            self._queue.fail(err)

    def _show_queue(self, counts: GroupCounts) -> None:
        self._messages.append("queue", counts.running, counts.complete, sum(counts.dropped.values()))
