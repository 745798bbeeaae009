"""The coordinator as a Ray actor. It handles metadata and references alone; samples go from worker to worker."""

import os
import pickle
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.cluster.object_store import GroupRef, to_group
from distflow.launch.run_setup import Start, begin_ledger
from distflow.observe.metrics import Measured
from distflow.rewards.score import RewardCounts
from distflow.runtime.checkpoint.state import load_live
from distflow.runtime.sample_queue.local import pending_groups_of
from distflow.runtime.sample_queue.pending_groups import Consumed, DpGroupShares, Facts, PendingGroup, Portion
from distflow.runtime.sample_queue.protocol import Failure, NewWorkers
from distflow.runtime.sample_queue.shared import SharedSampleQueue
from distflow.runtime.spec import Spec
from distflow.runtime.wait_log import Waits
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup, Version
from distflow.scheduling.snapshot import Snapshot

News = tuple[str, tuple[Any, ...]]
"""A method of the driver's view or callbacks, and its arguments."""

_MOST_NEWS = 10_000
_MOST_BYTES = 32_768
"""Of news in one reply."""
_PAGE = 64
"""Groups in one reply: a reference has some 170 bytes, the measurements of a group some hundreds. No object of more
than 64 kB comes here or goes to the driver."""


@dataclass(frozen=True)
class Standing:
    """The progress of the run. total_steps: as far as the data last."""

    version: Version
    restart: int
    total_steps: int
    finished: bool
    group_counts: GroupCounts


@dataclass(frozen=True)
class Page:
    """A part of the state that a checkpoint resumes from. cut: with the groups of this page alone. more: another page
    follows."""

    cut: Snapshot
    live: Mapping[int, PendingGroup[GroupRef]]
    more: bool


class CoordinatorActor:
    """Each method call runs on a thread of its own, and may wait there.

    A call that the worker does not wait for may fail here: then the run fails, and every worker is notified.
    """

    def __init__(
        self,
        spec: Spec,
        start: Start,
        allowed: tuple[str, ...],
        dp_groups: Sequence[DpGroupShares],
        workers: Sequence[str],
    ) -> None:
        """See `SharedSampleQueue`."""
        os.umask(0o077)
        self._coordinator, self._ledger = begin_ledger(spec, start.checkpoint, allowed)
        live = pending_groups_of(load_live(start.checkpoint)) if start.checkpoint else {}
        held: dict[int, PendingGroup[GroupRef]] = {}
        for number, each in live.items():
            group, num_bytes = to_group(each.group)
            held[number] = PendingGroup(group, each.num_tokens, each.measured)
            if self._coordinator.holds(number):
                self._coordinator.weigh(number, num_bytes)
        self._queue = SharedSampleQueue[GroupRef](
            self._coordinator, Waits(), dp_groups, workers, live=held, changed=self._show_queue, may_be_lost=True
        )
        self._rests: dict[int, Sequence[GroupRef]] = {}  # of a step's groups, by rank
        self._consumed: Consumed[GroupRef] | None = None  # until the leading rank takes the next step
        self._news: deque[News] = deque(maxlen=_MOST_NEWS)
        self._early: dict[str, dict[int, News]] = defaultdict(
            dict
        )  # arrived before an earlier message of the same sender
        self._num_told = Counter[str]()
        self._news_changed = threading.Condition()

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

    def wait_for_groups(self, worker: int, served: int | None) -> list[PromptGroup] | None:
        """See `SharedSampleQueue`."""
        return self._queue.wait_for_groups(worker, served)

    def put(
        self,
        prompt_group: PromptGroup,
        group: GroupRef,
        facts: Facts,
        measured: Sequence[Measured],
        reward_counts: RewardCounts,
    ) -> None:
        """reward_counts: by its worker since the group before it."""
        try:
            self._queue.count(reward_counts)
            self._queue.put(prompt_group, group, facts, measured)
        except Exception as err:  # nobody waits for the reply
            self._queue.fail(err)

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
        try:
            self._queue.count(reward_counts)
            self._queue.drop(prompt_group, reason, failure, lost=lost, accuracy=accuracy)
        except Exception as err:  # nobody waits for the reply
            self._queue.fail(err)

    def lose(self, worker: int) -> int:
        """See `SharedSampleQueue`."""
        return self._queue.lose(worker)

    def join(self, name: str) -> int:
        """See `SharedSampleQueue`."""
        return self._queue.join(name)

    def tell_of_new_workers(self) -> None:
        """See `SharedSampleQueue`."""
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
        """See `SharedSampleQueue`."""
        return self._queue.read(step, rank, lost)

    def release(self, step: int, rank: int, published: bool) -> Consumed[GroupRef]:
        """See `SampleQueuePort`. `checkpoint_page` returns the state that a checkpoint resumes from."""
        consumed = self._queue.release(step, rank, published)
        if rank == 0:
            self._consumed = consumed
        return replace(consumed, cut={**consumed.cut, "live": []}, live={})

    def checkpoint_page(self, page: int) -> Page:
        """Of the step released last, for the leading rank, before it takes the next one."""
        assert self._consumed is not None
        cut, held, here = self._consumed.cut, [*self._consumed.live.items()], slice(page * _PAGE, (page + 1) * _PAGE)
        return Page(
            {**cut, "live": cut["live"][here]}, dict(held[here]), max(len(held), len(cut["live"])) > (page + 1) * _PAGE
        )

    def stop(self) -> None:
        """See `SharedSampleQueue`."""
        self._queue.stop()

    def fail(self, failure: BaseException) -> None:
        """See `SharedSampleQueue`."""
        self._queue.fail(failure)

    def end(self) -> None:
        """No group is issued any more, and the ledger is complete."""
        self._queue.fail(RunEnded("the run has ended"))
        self._ledger.close()

    def tell(self, sender: str, number: int, method: str, *arguments: Any) -> None:
        """Queue a message for the driver, after all earlier ones of the sender. number: of the message, from 0."""
        with self._news_changed:
            early = self._early[sender]
            early[number] = method, arguments
            while (due := early.pop(self._num_told[sender], None)) is not None:
                self._news.append(due)
                self._num_told[sender] += 1
            self._news_changed.notify_all()

    def news(self, timeout_s: float) -> list[News]:
        """The messages since the last call, or the first of them; waits up to `timeout_s` for one."""
        with self._news_changed:
            if not self._news:
                self._news_changed.wait(timeout_s)
            found, num_bytes = list[News](), 0
            while self._news and num_bytes < _MOST_BYTES:
                found.append(self._news.popleft())
                num_bytes += len(pickle.dumps(found[-1]))
            return found

    def _show_queue(self, group_counts: GroupCounts) -> None:
        with self._news_changed:
            self._news.append(
                ("queue", (group_counts.running, group_counts.complete, sum(group_counts.dropped.values())))
            )


class RunEnded(RuntimeError):
    """The run has ended, and no more groups are issued."""
