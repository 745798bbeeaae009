"""The coordinator as a Ray actor. It handles metadata and references alone; samples go from worker to worker."""

import os
import pickle
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.cluster.object_store import GroupRef, to_group
from distflow.launch.run_setup import Start, begin_ledger
from distflow.rewards.score import RewardCounts
from distflow.runtime.checkpoint.state import load_queued
from distflow.runtime.sample_queue.protocol import FinishedGroup, NewWorkers, ResumePoint, TrainingStep
from distflow.runtime.sample_queue.shared import SharedSampleQueue
from distflow.runtime.spec import Spec
from distflow.runtime.wait_log import Waits
from distflow.scheduling.bin_packing import DpGroupShares
from distflow.scheduling.groups import GroupCounts, Version

News = tuple[str, tuple[Any, ...]]
"""A method of the driver's view or callbacks, and its arguments."""

_MOST_NEWS = 10_000
_MOST_BYTES = 32_768
"""Of news in one reply."""
_PAGE = 64
"""Groups in one reply: a reference has some 170 bytes, the measurements of a group some hundreds. No object of more
than 64 kB comes here or goes to the driver."""


@dataclass(frozen=True)
class Progress:
    """The progress of the run. total_steps: as far as the data last."""

    version: Version
    restart: int
    total_steps: int
    finished: bool
    group_counts: GroupCounts


class CoordinatorActor(SharedSampleQueue[GroupRef]):
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
        coordinator, self._ledger = begin_ledger(spec, start.checkpoint, allowed)
        queued: dict[int, FinishedGroup[GroupRef]] = {}
        for number, group in (load_queued(start.checkpoint) if start.checkpoint else {}).items():
            assert group.data is not None, "it is complete"
            reference, num_bytes = to_group(group.data)
            queued[number] = group.stored_as(reference)
            if coordinator.holds(number):
                coordinator.weigh(number, num_bytes)
        super().__init__(
            coordinator, Waits(), dp_groups, workers, queued=queued, changed=self._show_queue, may_be_lost=True
        )
        self._rests: dict[int, Sequence[GroupRef]] = {}  # of a step's groups, by rank
        self._news: deque[News] = deque(maxlen=_MOST_NEWS)
        self._early: dict[str, dict[int, News]] = defaultdict(
            dict
        )  # arrived before an earlier message of the same sender
        self._num_told = Counter[str]()
        self._news_changed = threading.Condition()

    def progress(self) -> Progress:
        coordinator = self._coordinator
        return Progress(
            coordinator.version,
            self._ledger.restart,
            coordinator.plan.total_steps,
            coordinator.finished,
            coordinator.checked_counts(),
        )

    def alive(self) -> None:
        """Replied to on a thread of its own."""

    def end(self, finished: FinishedGroup[GroupRef], reward_counts: RewardCounts) -> None:
        """A group has left the rollout loop. reward_counts: by its worker since the group before it."""
        try:
            super().count(reward_counts)
            (super().drop if finished.dropped else super().put)(finished)
        except Exception as err:  # nobody waits for the reply: the run ends with it
            super().fail(err)

    def take(self, step: int, rank: int) -> TrainingStep[Sequence[GroupRef]] | NewWorkers | None:
        """See `SampleQueuePort`. The first of its groups; `rest` has the others."""
        taken = super().take_groups(step, rank)
        if taken is None or isinstance(taken, NewWorkers):
            return taken
        if rank == 0:
            self._resume_point = None
        self._rests[rank] = taken.batch[_PAGE:]
        return replace(taken, batch=taken.batch[:_PAGE])

    def rest(self, rank: int) -> Sequence[GroupRef]:
        """The next groups of the step that the rank has taken; empty once it has all."""
        found = self._rests[rank][:_PAGE]
        self._rests[rank] = self._rests[rank][_PAGE:]
        return found

    def resume_page(self, page: int) -> ResumePoint[GroupRef]:
        """A part of `resume_point`, without any groups after the last one."""
        whole, here = super().resume_point(), slice(page * _PAGE, (page + 1) * _PAGE)
        queued = dict([*whole.queued.items()][here])
        return ResumePoint({**whole.snapshot, "live": whole.snapshot["live"][here]}, queued)

    def close(self) -> None:
        """No group is issued any more, and the ledger is complete."""
        self.fail(RunEnded("the run has ended"))
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
