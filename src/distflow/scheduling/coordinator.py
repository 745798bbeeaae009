"""The coordinator: issues groups, knows the state of every group, and decides when a step may be consumed."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import cast

from distflow.scheduling.curriculum import Accuracy, Skips
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.domain_shares import DomainShares
from distflow.scheduling.groups import CountsError, GroupCounts, GroupRecord, PromptGroup, Version
from distflow.scheduling.ledger import Ledger, Mark
from distflow.scheduling.ledger_audit import STALE
from distflow.scheduling.ledger_record import inherited_fields
from distflow.scheduling.next_groups import Counts, NextGroups
from distflow.scheduling.rollout_capacity import Admission
from distflow.scheduling.sample_queue import SampleQueue, still_consumable
from distflow.scheduling.snapshot import (
    SavedMark,
    Snapshot,
    at_start,
    check_resumable,
    restored,
    saved_group,
    saved_plan,
)

LOST = "lost"
"""Why a group of an offered row is dropped: its process ended, and the row is gone with it."""


class Coordinator:
    """Metadata only, without threads or locks of its own: threads share it under a lock, processes through an actor.

    A group goes take_groups → complete | drop | retry | abort; a step goes ready → release, which consumes
    its groups and ends in a new version. Every move is written to the ledger; an impossible one raises CountsError
    naming the group. At staleness 0 every step consumes all groups that were issued for it, so the queue is empty after
    a release (except for aborted groups, and those of an earlier run with more staleness), and a resumed run repeats
    what an uninterrupted run would do. Otherwise groups stay in the queue, and the snapshot lists them.

    Each of several domains has its own order, epoch and position, and its slots in every step (`domain_quotas`): a new
    group is of the domain with the first slot without a group, so that a dropped group is replaced by one of its
    domain.

    Groups are made of rows of the data set and of offered rows: these have row numbers after the data set's, and come
    first (`NextGroups`).

    Versions here are steps: version v is the weights after v steps, or the previous weights under a new number if
    nothing was updated. A step that changed weights without a weight sync leaves the engines at their version.
    """

    def __init__(self, plan: DataPlan, ledger: Ledger | None = None, snapshot: Snapshot | None = None) -> None:
        """snapshot: resume from it, with a ledger that was rolled back to `mark_of(snapshot)`. Groups that were
        complete in it are complete (the caller has their batches), those that ran then are issued first, and those
        issued after it are issued again, all with the same group ids. A group that died with its process has not
        failed: it uses up none of its three attempts.

        Staleness and batch size may differ from the snapshot's: complete groups that no step can consume in time are
        dropped as stale, and `holds` is false for them. Raises UserError if the data or their order are not those of
        the snapshot.
        """
        start = snapshot or at_start(plan)
        check_resumable(plan, start)
        self.plan = plan
        self._ledger = ledger
        self._restart = ledger.restart if ledger else start["restart"] + 1
        self.version = Version(self._restart, start["step"])
        self.weights_step = start["step"]  # a resumed run first sends the weights that it resumes from
        self._counts = Counts(start)
        self.prompt_groups = NextGroups(plan, self._counts, start.get("offered", 0))
        self.shares = DomainShares(plan, start)
        self._skips = Skips(plan.skips, start.get("skips"))
        self._queue = SampleQueue(
            plan.consumer_batch,
            max_staleness=plan.max_staleness,
            next_step=self.step,
            when_exhausted=plan.when_exhausted,
            quotas=self.shares.quotas,
            domains=[source.name for source in plan.sources],
            oversampling=plan.oversampling,
        )
        self._admission = Admission(plan, self._queue)
        quotas = {"quotas": self.shares.shown()} if plan.domains else {}
        self._journal("plan", max_staleness=plan.max_staleness, consumer_batch=plan.consumer_batch, **quotas)
        for change in self.shares.saved_shares()[1:]:
            self._journal("shares", **change)
        if ledger and ledger.inherits:
            self._journal("inherited", **inherited_fields(start, self._counts.domains))
        self._restore([restored(group) for group in start["live"]])
        self._close_at_end()
        self._check()
        self._cut = self._describe()

    @property
    def step(self) -> int:
        """The step that is consumed next."""
        return self.version.step

    @property
    def finished(self) -> bool:
        """Whether no step is left: all were consumed, or the data ended and the queue is empty."""
        return self.step >= self.plan.total_steps or (self._queue.closed and not self._queue.num_live)

    def take_groups(self, engine_version: int | None = None) -> list[PromptGroup]:
        """The groups to start now: lost ones that wait for another attempt, then new ones, each by group id. At
        staleness 0 they come in waves; none while the last wave runs or the step is full.

        engine_version: the lowest version of any engine, None for that of the last release. A version whose step is not
        released yet counts as the one before. Raises CountsError if versions go backwards, or ahead of the steps.
        """
        engine_version = self._admission.see(self.step if engine_version is None else engine_version)
        if self.finished:
            return []
        num_capacity = self._admission.rollout_capacity(engine_version)
        prompt_groups = [
            self._reissue(number, engine_version) for number in self._admission.waiting(engine_version, num_capacity)
        ]
        # Lost groups are a wave of their own; with oversampling, where every step begins with some, part of one.
        num_open = (
            num_capacity - len(prompt_groups)
            if self.plan.oversampling
            else self._admission.rollout_capacity(engine_version)
        )
        for source in self._admission.new(engine_version, num_open, self.prompt_groups.num_left):
            if (new := self._issue_next(source, engine_version)) is None:
                break
            prompt_groups.append(new)
            self._admission.issued(source, engine_version)
        self._close_at_end()
        return prompt_groups

    def assign(self, number: int, worker: str) -> None:
        """Record in the ledger that `worker` works on the group from now on."""
        self._journal("assigned", group_id=number, worker=worker)

    def offer(self) -> int:
        """Add a row that is not in the data set; returns its number. Not in a run with domains, which have all
        slots."""
        row = self.prompt_groups.offer()
        self._queue.close(False)
        return row

    def complete(self, number: int, num_tokens: int, version: int | None = None) -> None:
        """Note that a group has its rewards and passed all filters. num_tokens: of all its samples, prompts included.
        version: the lowest of any of their tokens, None for the group's."""
        group = self._queue.complete(number, num_tokens, version)
        self._journal("complete", group_id=number, tokens=num_tokens, version=group.version)

    def weigh(self, number: int, num_bytes: int) -> None:
        """Note the size of a complete group, for `plan.max_held_bytes`."""
        self._admission.memory.weigh(number, num_bytes)

    def drop(self, number: int, reason: str) -> None:
        """Drop a group without training on it: its id is used up, its rollout capacity is free again."""
        group = self._queue.drop(number, reason)
        self._journal("dropped", group_id=number, reason=reason)
        self._counts.drop(group.domain, reason)

    def record_accuracy(self, number: int, accuracy: Accuracy | None) -> None:
        """Note the accuracy of a running group's responses, None if they were not scored, before it is completed or
        dropped."""
        if accuracy is not None:
            prompt_group = self._queue.running_group(number, "be scored").prompt_group
            self._skips.record(prompt_group.domain, prompt_group.row, accuracy)
            self.shares.record(prompt_group.domain, accuracy)

    def retry(self, number: int) -> bool:
        """A group was lost during the run, with the engine or the process that worked on it.

        Returns whether it waits for `take_groups` to issue it again. If not, this was its third attempt and it is
        dropped as max_retries.
        """
        waits = self._queue.retry(number)
        if not waits:
            self.drop(number, "max_retries")
        return waits

    @property
    def is_full(self) -> bool:
        """See `SampleQueue.is_full`."""
        return self._queue.is_full

    def has_place(self, number: int) -> bool:
        """See `SampleQueue.has_place`."""
        return self._queue.has_place(number)

    def abort(self, numbers: Sequence[int], num_tokens: int) -> None:
        """Running groups that are no longer needed were aborted, and wait to be issued again. num_tokens: generated for
        them and discarded."""
        groups = [self._queue.abort(number) for number in numbers]
        self._journal("aborted", group_ids=list(numbers), tokens=num_tokens)
        self._counts.aborted_tokens += num_tokens
        for group in groups:
            self._counts.abort(group.domain)

    def lose(self, number: int) -> None:
        """The samples of a complete group that no step has taken are gone with the process that had them: the group
        waits to be issued again, and this uses up none of its three attempts."""
        self._queue.lose(number)
        self._journal("lost", group_id=number)

    def ready(self, step: int) -> tuple[int, ...] | None:
        """Ids of the groups that form `step`, ascending, or None while it waits for groups; see
        `SampleQueue.ready` for short steps. Raises Exhausted, and CountsError if one of its groups is staler than
        the plan allows."""
        numbers = self._queue.ready(step, exhausted=self._admission.is_spent(self.weights_step))
        if numbers is None and self._admission.is_stuck(self.weights_step):
            raise CountsError(
                f"step {step + 1} can get no groups: the engines have weights of version "
                f"{self._admission.engine_version}, max_staleness is {self.plan.max_staleness}, and no later version "
                "was sent"
            )
        return numbers

    def part(self, step: int, wanted: int) -> tuple[int, ...] | None:
        """Ids of `wanted` more groups of a step that is taken in parts, ascending; see `SampleQueue.part`.

        Such a step must have taken all groups that it owes (`num_owed`) when it is released.
        """
        exhausted = self._queue.num_taken == 0 and self._admission.is_spent(self.weights_step)
        return self._queue.part(step, wanted, exhausted)

    def untake(self) -> None:
        """The step that was formed could not be read: its groups wait again, and missing ones can be marked as lost."""
        self._queue.untake()

    def num_owed(self) -> int:
        """See `SampleQueue.num_owed`."""
        return self._queue.num_owed()

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self._queue.num_untaken

    @property
    def untaken(self) -> list[int]:
        """See `SampleQueue.untaken`."""
        return self._queue.untaken

    @property
    def stalled(self) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is offered."""
        return self._admission.is_stalled(self.prompt_groups.num_left)

    def holds(self, number: int) -> bool:
        """Whether the group is complete and waits for its step, so that its batch must be kept."""
        return self._queue.holds(number)

    def release(self, step: int, sent_weights: bool = True) -> Version:
        """Consume the step, which ends in a new version, on disk when this returns. Counts are checked.

        sent_weights: whether new weights were sent; if not, the version stands for the last ones that were sent, or the
        engines keep an older one. `take_groups` gets their version, which the caller sets before this call.
        Raises UserError, and changes nothing, if a curriculum fails.
        """
        self.ready(step)
        if change := self.shares.change(step):
            self._journal("shares", **change)
        groups = self._queue.release(step)
        left = self._queue.num_live - self._queue.num_waiting
        assert self.plan.max_staleness or not left, "at staleness 0 a step leaves nothing behind that has started"
        numbers = [group.group_id for group in groups]
        for group in groups:
            self._counts.consume(group.domain)
        self._admission.released()
        self.version = Version(self._restart, step + 1)
        self.weights_step = step + 1 if sent_weights else self.weights_step
        self._journal("consumed", step=self.step, group_ids=numbers, tokens=sum(group.num_tokens for group in groups))
        self._journal("version", step=self.step, weights=self.weights_step)
        if self._ledger:
            self._ledger.sync()
        self._check()
        self._cut = self._describe()
        return self.version

    def checked_counts(self) -> GroupCounts:
        return self._counts.group_counts(self._queue.num_running, self._queue.num_complete)

    def snapshot(self) -> Snapshot:
        """JSON to resume from: the state at the last release (or the start), whatever has happened since."""
        return self._cut

    def _close_at_end(self) -> None:
        if self.prompt_groups.data_open and self.prompt_groups.num_left == 0:
            self._queue.close()

    def _issue_next(self, source: int, engine_version: int) -> PromptGroup | None:
        """The source's next group that is not skipped; None if the data end before. If all rows of an epoch would be
        skipped, the row after them is taken: no source runs empty."""
        num_left = self.plan.sources[source].num_rows
        while self.prompt_groups.num_left != 0:
            prompt_group = self.prompt_groups.make(source, engine_version)
            self._queue.issue(prompt_group)
            self._counts.issue(prompt_group.domain)
            self._journal("issued", **prompt_group.issued_fields())
            reason = self._skips.pass_over(prompt_group.row)
            if reason is None or not num_left:
                return prompt_group
            num_left -= 1
            self.drop(prompt_group.group_id, reason)
        return None

    def _reissue(self, number: int, engine_version: int) -> PromptGroup:
        if self._queue.was_aborted(number):
            self._admission.issued(
                [*self._queue.domain_queues.values()].index(self._queue.queue_of(number)), engine_version
            )
        prompt_group = self._queue.reissue(number, engine_version)
        self._journal("issued", **prompt_group.issued_fields())
        return prompt_group

    def _restore(self, groups: list[GroupRecord]) -> None:
        complete = [group for group in groups if group.complete]
        fit, stale = list[GroupRecord](), list[GroupRecord]()
        for number, source in enumerate(self.plan.sources):
            own = [group for group in complete if group.domain == source.name]
            parts = still_consumable(own, self.plan.max_staleness, partial(self.shares.quotas.up_to, number))
            fit += parts[0]
            stale += parts[1]
        running = [group for group in groups if not group.complete]
        lost = [group for group in running if group.prompt_group.row >= self.plan.num_rows]
        for group in [*fit, *(group for group in running if group not in lost)]:
            self._queue.restore(group)
        for group, reason in [*((group, STALE) for group in stale), *((group, LOST) for group in lost)]:
            self._journal("dropped", group_id=group.group_id, reason=reason)
            self._counts.drop(group.domain, reason)

    def _describe(self) -> Snapshot:
        counts = self._counts
        described: Snapshot = {
            "plan": saved_plan(self.plan),
            "restart": self._restart,
            "step": self.step,
            "issued": counts.issued,
            "offered": self.prompt_groups.num_offered,
            "consumed": counts.consumed,
            "dropped": dict(counts.dropped),
            "live": [saved_group(group) for group in self._queue.live],
            "ledger": cast(SavedMark, asdict(self._ledger.mark())) if self._ledger else None,
        }
        if counts.aborted:
            described["aborted"], described["aborted_tokens"] = counts.aborted, counts.aborted_tokens
        if self.plan.domains:
            described["domains"] = counts.saved_domains(self.shares.lags())
        if self.plan.skips:
            described["skips"] = self._skips.saved_skips()
        if (curriculum := self.shares.curriculum) is not None:
            described["shares"], described["curriculum"] = self.shares.saved_shares(), curriculum
        return described

    def _journal(self, kind: str, **fields: object) -> None:
        if self._ledger:
            self._ledger.append(kind, **fields)

    def _check(self) -> None:
        group_counts = self.checked_counts()
        group_counts.check()
        if self._ledger and self._ledger.group_counts != group_counts:
            raise CountsError(f"the ledger counts {self._ledger.group_counts}, the coordinator {group_counts}")


def mark_of(snapshot: Snapshot) -> Mark | None:
    """The ledger's position at the snapshot, to which a `Ledger` is rolled back."""
    return Mark(**snapshot["ledger"]) if snapshot["ledger"] else None
