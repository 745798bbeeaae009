"""The coordinator as an actor: metadata and references alone, whatever travels between workers."""

import os
import pickle
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.cluster.object_store import GroupRef, to_group
from distflow.observe.metrics import Measured
from distflow.rewards.call_counts import RewardCounts
from distflow.runtime.checkpoint.state import load_live
from distflow.runtime.run_setup import Start, begin_ledger
from distflow.runtime.sample_queue.local import pending_groups_of
from distflow.runtime.sample_queue.pending_groups import Consumed, Facts, Held, Portion, Team
from distflow.runtime.sample_queue.protocol import Failure, NewWorkers
from distflow.runtime.sample_queue.shared import SharedSampleQueue
from distflow.runtime.spec import Spec
from distflow.runtime.wait_log import Waits
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup, Version
from distflow.scheduling.snapshot import Snapshot

News = tuple[str, tuple[Any, ...]]
"""A method of what the driver shows, and its arguments."""

_MOST_NEWS = 10_000
_MOST_BYTES = 32_768
"""Of news in one answer."""
_PAGE = 64
"""Groups in one answer: a reference has some 170 bytes, what was measured of a group some hundreds. No object of more
than 64 kB comes here or goes to the driver."""


@dataclass(frozen=True)
class Standing:
    """How the run stands. total_steps: as far as the data last."""

    version: Version
    restart: int
    total_steps: int
    finished: bool
    group_counts: GroupCounts


@dataclass(frozen=True)
class Page:
    """A part of what a checkpoint goes on from. cut: with the groups of this page alone. more: another page follows."""

    cut: Snapshot
    live: Mapping[int, Held[GroupRef]]
    more: bool


class CoordinatorActor:
    """Its methods are called on threads of their own; those that wait do so there.

    What a worker tells without waiting for an answer may fail here: then the run has failed, and all are told.
    """

    def __init__(
        self, spec: Spec, start: Start, allowed: tuple[str, ...], dp_groups: Sequence[Team], workers: Sequence[str]
    ) -> None:
        """See `SharedSampleQueue`."""
        os.umask(0o077)
        self._coordinator, self._ledger = begin_ledger(spec, start.checkpoint, allowed)
        live = pending_groups_of(load_live(start.checkpoint)) if start.checkpoint else {}
        held: dict[int, Held[GroupRef]] = {}
        for number, each in live.items():
            group, num_bytes = to_group(each.group)
            held[number] = Held(group, each.num_tokens, each.measured)
            if self._coordinator.holds(number):
                self._coordinator.weigh(number, num_bytes)
        self._edge = SharedSampleQueue[GroupRef](
            self._coordinator, Waits(), dp_groups, workers, live=held, changed=self._show_queue, may_be_lost=True
        )
        self._rests: dict[int, Sequence[GroupRef]] = {}  # of portions, by rank
        self._consumed: Consumed[GroupRef] | None = None  # with what is left of it, until the rank that leads goes on
        self._news: deque[News] = deque(maxlen=_MOST_NEWS)
        self._early: dict[str, dict[int, News]] = defaultdict(dict)  # told, but not what its sender told before it
        self._num_told = Counter[str]()
        self._told = threading.Condition()

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
        """Answered on a thread of its own."""

    def wait_for_groups(self, worker: int, served: int | None) -> list[PromptGroup] | None:
        """See `SharedSampleQueue`."""
        return self._edge.wait_for_groups(worker, served)

    def put(
        self,
        prompt_group: PromptGroup,
        group: GroupRef,
        facts: Facts,
        measured: Sequence[Measured],
        judged: RewardCounts,
    ) -> None:
        """judged: by its worker since the group before it."""
        try:
            self._edge.count(judged)
            self._edge.put(prompt_group, group, facts, measured)
        except Exception as err:  # nobody waits for the answer
            self._edge.fail(err)

    def drop(
        self,
        prompt_group: PromptGroup,
        reason: str,
        failure: Failure | None,
        lost: bool,
        accuracy: Accuracy | None,
        judged: RewardCounts,
    ) -> None:
        """judged: see `put`."""
        try:
            self._edge.count(judged)
            self._edge.drop(prompt_group, reason, failure, lost=lost, accuracy=accuracy)
        except Exception as err:  # nobody waits for the answer
            self._edge.fail(err)

    def lose(self, worker: int) -> int:
        """See `SharedSampleQueue`."""
        return self._edge.lose(worker)

    def join(self, name: str) -> int:
        """See `SharedSampleQueue`."""
        return self._edge.join(name)

    def tell_of_new_workers(self) -> None:
        """See `SharedSampleQueue`."""
        self._edge.tell_of_new_workers()

    def take(self, step: int, rank: int) -> Portion[GroupRef] | NewWorkers | None:
        """See `SampleQueuePort`. The first of its groups; `rest` has the others."""
        portion = self._edge.take(step, rank)
        if portion is None or isinstance(portion, NewWorkers):
            return portion
        if rank == 0:
            self._consumed = None
        self._rests[rank] = portion.groups[_PAGE:]
        return replace(portion, groups=portion.groups[:_PAGE])

    def rest(self, rank: int) -> Sequence[GroupRef]:
        """More groups of what the rank has taken, each once; none once it has all."""
        found = self._rests[rank][:_PAGE]
        self._rests[rank] = self._rests[rank][_PAGE:]
        return found

    def read(self, step: int, rank: int, lost: Sequence[int]) -> bool:
        """See `SharedSampleQueue`."""
        return self._edge.read(step, rank, lost)

    def release(self, step: int, rank: int, published: bool) -> Consumed[GroupRef]:
        """See `SampleQueuePort`; what a checkpoint goes on from, `kept` has."""
        consumed = self._edge.release(step, rank, published)
        if rank == 0:
            self._consumed = consumed
        return replace(consumed, cut={**consumed.cut, "live": []}, live={})

    def kept(self, page: int) -> Page:
        """Of the step released last, for the rank that leads, before it takes the next one."""
        assert self._consumed is not None
        cut, held, here = self._consumed.cut, [*self._consumed.live.items()], slice(page * _PAGE, (page + 1) * _PAGE)
        return Page(
            {**cut, "live": cut["live"][here]}, dict(held[here]), max(len(held), len(cut["live"])) > (page + 1) * _PAGE
        )

    def stop(self) -> None:
        """See `SharedSampleQueue`."""
        self._edge.stop()

    def fail(self, failure: BaseException) -> None:
        """See `SharedSampleQueue`."""
        self._edge.fail(failure)

    def end(self) -> None:
        """No group is handed out any more, and the journal is whole."""
        self._edge.fail(RunEnded("the run has ended"))
        self._ledger.close()

    def tell(self, sender: str, number: int, method: str, *arguments: Any) -> None:
        """Something for the driver to show, behind all that the sender has told before. number: of it, from 0."""
        with self._told:
            early = self._early[sender]
            early[number] = method, arguments
            while (due := early.pop(self._num_told[sender], None)) is not None:
                self._news.append(due)
                self._num_told[sender] += 1
            self._told.notify_all()

    def news(self, timeout_s: float) -> list[News]:
        """What was told since this was asked last, or the first of it; waits for some, but no longer than that."""
        with self._told:
            if not self._news:
                self._told.wait(timeout_s)
            found, num_bytes = list[News](), 0
            while self._news and num_bytes < _MOST_BYTES:
                found.append(self._news.popleft())
                num_bytes += len(pickle.dumps(found[-1]))
            return found

    def _show_queue(self, group_counts: GroupCounts) -> None:
        with self._told:
            self._news.append(
                ("queue", (group_counts.running, group_counts.complete, sum(group_counts.dropped.values())))
            )


class RunEnded(RuntimeError):
    """Nothing is left to do."""
