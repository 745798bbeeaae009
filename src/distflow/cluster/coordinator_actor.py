"""The coordinator as an actor. Over Ray it handles only metadata and references; samples go from
worker to worker."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distflow.cluster.remote_sample_queue import GroupRef, RowsOfGroup, to_group
from distflow.cluster.reports_to_driver import Message, MessageQueue
from distflow.cluster.shared_reshard import SharedReshard
from distflow.data.encoded_prompts import PromptRow
from distflow.launch.run_start import Start, begin_ledger
from distflow.observe.writing.timing import Waits
from distflow.planning.plan import dp_groups_of
from distflow.rewards.reward_results import RewardCounts
from distflow.runtime.checkpoint.restore import load_queued
from distflow.runtime.dp_groups import DpGroupShares, queue_dp_group
from distflow.runtime.sample_queue.protocol import (
    EndedGroups,
    FinishedGroup,
    NewWorkers,
    TrainingStep,
)
from distflow.runtime.sample_queue.queue_base import SharedSampleQueue
from distflow.runtime.spec import Spec
from distflow.scheduling.group_states import GroupCounts, Version


class RunEnded(RuntimeError):
    """The run has ended, and no more groups are issued."""


@dataclass(frozen=True)
class Progress:
    """The progress of the run. total_steps: as many as the data allow."""

    version: Version
    total_steps: int
    finished: bool
    group_counts: GroupCounts


class CoordinatorActor(SharedSampleQueue[GroupRef]):
    """Each method call runs on its own thread, and may wait there.

    A call that the worker does not wait for may fail here: then the run fails, and every worker is
    notified.
    """

    def __init__(self, spec: Spec, start: Start, own_loop: bool = False) -> None:
        """own_loop: a user's own loop in the driver takes the steps, for all ranks."""
        start.join(spec)
        self._messages = MessageQueue()
        self._reshard = SharedReshard()
        coordinator, self._ledger = begin_ledger(spec, start)

        queued: dict[int, FinishedGroup[GroupRef]] = {}
        stored = load_queued(start.checkpoint) if start.checkpoint else {}
        for number, group in stored.items():
            reference, num_bytes = to_group(group.data, spec.config.trainer.launcher != "local")
            queued[number] = group.stored_as(reference)
            if coordinator.queue.holds(number):
                coordinator.weigh(number, num_bytes)

        dp_groups = [queue_dp_group(spec, each) for each in dp_groups_of(spec.plan)]
        super().__init__(
            coordinator,
            Waits(),
            [DpGroupShares()] if own_loop else dp_groups,
            [str(rank.rank) for rank in spec.plan.ranks if rank.rollout_nodes],
            queued=queued,
            may_be_lost=True,
        )
        self._num_releases = sum(len(each.shares) for each in dp_groups)
        coordinator.prompt_groups.data_open = not own_loop  # until the loop requests some

    def progress(self) -> Progress:
        with self._lock:
            coordinator = self._coordinator
            counts = coordinator.checked_counts()
            return Progress(
                coordinator.version, coordinator.plan.total_steps, coordinator.finished, counts
            )

    def alive(self) -> None:
        """A heartbeat, answered by a separate thread."""

    def end(self, ended: EndedGroups[GroupRef], reward_counts: RewardCounts) -> None:
        """Groups have left the rollout loop. reward_counts: of their worker since the previous
        call."""
        try:
            super().count(reward_counts)
            super().end_groups(ended)
        except Exception as err:  # nobody waits for the reply: the run ends with it
            super().fail(err)

    def fail(self, failure: BaseException) -> None:
        super().fail(failure)
        self._reshard.fail(failure)

    def put_share(self, *share: Any) -> None:
        """See `SharedReshard`, as of the next two."""
        self._reshard.put_share(*share)

    def pick_share(self, *share: Any) -> Any:
        return self._reshard.pick_share(*share)

    def release_share(self, *share: Any) -> None:
        self._reshard.release_share(*share)

    def submitted_row(self, number: int) -> PromptRow:
        return self.submissions.row(number)

    def of_group(self, number: int) -> Any:
        """A reference to the options of a row's group: user modules are not imported here."""
        return self.submissions.of_group(number)

    def take(
        self, step: int, rank: int, wanted: int | None = None, timeout_s: float | None = None
    ) -> TrainingStep[Sequence[GroupRef]] | NewWorkers | None:
        """See `take_step`. timeout_s: instead of a deadline."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        taken = super().take_step(step, rank, wanted, deadline)
        if isinstance(taken, TrainingStep) and rank == 0:
            self._resume_point = None  # it references groups
        return taken

    def _data_of(self, groups: Sequence[FinishedGroup[GroupRef]]) -> Sequence[GroupRef]:
        return [RowsOfGroup.of(group) for group in groups]

    def close(self) -> None:
        """Issue no more groups, and complete the ledger."""
        self.fail(RunEnded("the run has ended"))
        self._ledger.close()

    def add_message(self, method: str, *arguments: Any) -> None:
        self._messages.append(method, *arguments)

    def messages(self, timeout_s: float) -> list[Message]:
        return self._messages.fetch(timeout_s)
