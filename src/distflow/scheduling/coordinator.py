"""The coordinator: hands out groups on credits, knows where every group is, and says when a step may be consumed."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import cast

from distflow.scheduling.curriculum import Accuracy, Skips
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.domain_queue import Group
from distflow.scheduling.domain_shares import DomainShares
from distflow.scheduling.groups import CountsError, GroupCounts, PromptGroup, Version, domain_of
from distflow.scheduling.ledger import Ledger, Mark
from distflow.scheduling.ledger_audit import STALE
from distflow.scheduling.ledger_record import inherited_fields, issued_fields
from distflow.scheduling.next_groups import Counts, NextGroups
from distflow.scheduling.rollout_capacity import Admission
from distflow.scheduling.sample_queue import SampleQueue, still_consumable
from distflow.scheduling.snapshot import SavedMark, Snapshot, at_start, check_resumable, restored, saved, saved_plan

LOST = "lost"
"""Why a group of an offered row is dropped: its process ended before it did, and the row with it."""


class Coordinator:
    """Metadata only, with no task and no lock of its own: threads share it under a lock, processes through an actor.

    A group goes take_groups → complete | drop | retry | abort; a step goes ready → release, which makes its groups
    consumed and ends in a new version. Every move is journaled; one that cannot be made raises CountsError naming
    the group. At staleness 0 every step consumes all that was drawn for it, so a release leaves nothing behind (but
    what a run of more staleness had begun, and what was aborted), and a run that goes on from one repeats what an
    uninterrupted run would do. Otherwise groups stay in the queue, and the cut lists them.

    Of several domains each has its own order, epoch and position, and its places in every step (`flow.quotas`): a new
    group is of the domain whose next place without a group comes first, so that what takes the place of a dropped one
    is of its domain.

    Groups are of rows of the data set, and of rows that somebody offers: these have the row numbers behind the data
    set's, and go first (`NextGroups`).

    Versions here are steps: version v are the weights after v steps, or those before under a new number where nothing
    was updated. A step that sent no weights although it changed them leaves the engines where they were.
    """

    def __init__(self, plan: DataPlan, ledger: Ledger | None = None, snapshot: Snapshot | None = None) -> None:
        """snapshot: goes on from it, with a ledger that was rolled back to `mark_of(snapshot)`. Groups that were
        complete at its cut are complete (whoever calls has their batches), those that ran then are handed out first,
        and those drawn after it are drawn again, all under the same groups. Being killed with the process is no
        failure of a group: of its three attempts it uses up none.

        Staleness and batch size may be others than the snapshot's: complete groups that no step can consume in time any
        more are dropped as stale, and `holds` is false of them. Raises UserError where the data or their order are not
        those of the snapshot.
        """
        start = snapshot or at_start(plan)
        check_resumable(plan, start)
        self.plan = plan
        self._ledger = ledger
        self._restart = ledger.restart if ledger else start["restart"] + 1
        self.version = Version(self._restart, start["step"])
        self.weights_step = start["step"]  # a run that goes on begins by sending what it goes on from
        self._counts = Counts(start)
        self.prompt_groups = NextGroups(plan, self._counts, start.get("offered", 0))
        self.shares = DomainShares(plan, start)
        self._skips = Skips(plan.skips, start.get("skips"))
        self._edge = SampleQueue(
            plan.consumer_batch,
            max_staleness=plan.max_staleness,
            next_step=self.step,
            when_exhausted=plan.when_exhausted,
            quotas=self.shares.quotas,
            domains=[source.name for source in plan.sources],
            oversampling=plan.oversampling,
        )
        self._admission = Admission(plan, self._edge)
        quotas = {"quotas": self.shares.shown()} if plan.domains else {}
        self._journal("plan", max_staleness=plan.max_staleness, consumer_batch=plan.consumer_batch, **quotas)
        for change in self.shares.saved()[1:]:
            self._journal("shares", **change)
        if ledger and ledger.inherits:
            self._journal("inherited", **inherited_fields(start, self._counts.domains))
        self._restore([restored(group) for group in start["live"]])
        self._close_at_end()
        self._check()
        self._cut = self._describe()

    @property
    def step(self) -> int:
        """The step to be consumed next."""
        return self.version.step

    @property
    def finished(self) -> bool:
        """Whether no step is left: all were consumed, or the data ended and nothing of it is left in the queue."""
        return self.step >= self.plan.total_steps or (self._edge.closed and not self._edge.num_live)

    def take_groups(self, served_step: int | None = None) -> list[PromptGroup]:
        """The groups to start now: those that were lost and wait for another attempt, then new ones, each in group
        order. At staleness 0 they come in waves, empty while the last one runs or the step is full.

        served_step: the lowest version that an engine serves, None for that of the last release. One whose step is not
        released yet counts as the one before. Raises CountsError where versions go backwards, or ahead of the
        steps.
        """
        served = self._admission.see(self.step if served_step is None else served_step)
        if self.finished:
            return []
        num_capacity = self._admission.credits(served)
        prompt_groups = [self._reissue(number, served) for number in self._admission.waiting(served, num_capacity)]
        # Lost ones are a wave of their own; with oversampling, where every step begins with some, they open one.
        num_open = num_capacity - len(prompt_groups) if self.plan.oversampling else self._admission.credits(served)
        for source in self._admission.new(served, num_open, self.prompt_groups.num_left):
            if (new := self._issue_next(source, served)) is None:
                break
            prompt_groups.append(new)
            self._admission.issued(source, served)
        self._close_at_end()
        return prompt_groups

    def assign(self, number: int, worker: str) -> None:
        """`worker` works on the group from now on: it is journaled, and nothing else follows from it."""
        self._journal("assigned", group_id=number, worker=worker)

    def offer(self) -> int:
        """Somebody has a row of his own to be answered; the number that its group will name it by. Not of a run with
        domains, which have all places."""
        row = self.prompt_groups.offer()
        self._edge.close(False)
        return row

    def complete(self, number: int, num_tokens: int, version: int | None = None) -> None:
        """A group has passed its rewards and filters. num_tokens: of all its samples, prompts included. version: the
        lowest of any of their tokens, None for that of its group."""
        group = self._edge.complete(number, num_tokens, version)
        self._journal("complete", group_id=number, tokens=num_tokens, version=group.version)

    def weigh(self, number: int, num_bytes: int) -> None:
        """What a complete group takes of the memory that `plan.max_held_bytes` bounds: known to who holds it alone."""
        self._admission.room.weigh(number, num_bytes)

    def drop(self, number: int, reason: str) -> None:
        """A group leaves without being trained on. Its group is spent, its credit comes back."""
        group = self._edge.drop(number, reason)
        self._journal("dropped", group_id=number, reason=reason)
        self._counts.drop(group.prompt_group, reason)

    def judged(self, prompt_group: PromptGroup, accuracy: Accuracy) -> None:
        """A group has its verdicts, whatever becomes of it: told before that is."""
        domain = domain_of(prompt_group.stream)
        self._skips.judged(domain, prompt_group.row, accuracy)
        self.shares.judged(domain, accuracy)

    def retry(self, number: int) -> bool:
        """A group was lost while the run goes on: with the engine or the process that worked on it.

        Returns whether it waits for `take_groups` to hand it out again. If not, this was its third attempt and it is
        dropped as max_retries.
        """
        waits = self._edge.retry(number)
        if not waits:
            self.drop(number, "max_retries")
        return waits

    @property
    def is_full(self) -> bool:
        """See `SampleQueue.is_full`."""
        return self._edge.is_full

    def has_place(self, number: int) -> bool:
        """See `SampleQueue.has_place`."""
        return self._edge.has_place(number)

    def abort(self, numbers: Sequence[int], num_tokens: int) -> None:
        """Groups that run are not needed any more: they were ended, and wait to be handed out again. num_tokens: drawn
        for them and thrown away."""
        groups = [self._edge.abort(number) for number in numbers]
        self._journal("aborted", group_ids=list(numbers), tokens=num_tokens)
        self._counts.abort((group.prompt_group for group in groups), num_tokens)

    def lose(self, number: int) -> None:
        """What was made of a complete group that no step has taken is gone with the process that held it: the group
        waits to be handed out again, and of its three attempts this uses up none."""
        self._edge.lose(number)
        self._journal("lost", group_id=number)

    def ready(self, step: int) -> tuple[int, ...] | None:
        """Numbers of the groups that form `step`, ascending, or None while it waits for groups; see
        `SampleQueue.ready` for short steps. Raises Exhausted, and CountsError where a group of it is staler than
        the plan allows."""
        numbers = self._edge.ready(step, exhausted=self._admission.is_spent(self.weights_step))
        if numbers is None and self._admission.is_stuck(self.weights_step):
            raise CountsError(
                f"step {step} can get no groups: the weights that are served are of version {self._admission.served}, "
                f"max_staleness is {self.plan.max_staleness}, and no later version was sent"
            )
        return numbers

    def part(self, step: int, wanted: int) -> tuple[int, ...] | None:
        """Numbers of `wanted` more groups of a step that is taken in parts, ascending; see `SampleQueue.part`.

        A step that is taken so must have taken all that it owes (`num_owed`) when it is released.
        """
        exhausted = self._edge.num_taken == 0 and self._admission.is_spent(self.weights_step)
        return self._edge.part(step, wanted, exhausted)

    def untake(self) -> None:
        """The step that is formed could not be read: its groups wait again, and those that are gone can be lost."""
        self._edge.untake()

    def num_owed(self) -> int:
        """See `SampleQueue.num_owed`."""
        return self._edge.num_owed()

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self._edge.num_untaken

    @property
    def untaken(self) -> list[int]:
        """See `SampleQueue.untaken`."""
        return self._edge.untaken

    @property
    def stalled(self) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is offered."""
        return self._admission.is_stalled(self.prompt_groups.num_left)

    def holds(self, number: int) -> bool:
        """Whether the group is complete and waits for its step: its batch is to be kept."""
        return self._edge.holds(number)

    def release(self, step: int, published: bool = True) -> Version:
        """The step is consumed and ends in a new version, on the disk when this returns. The account is checked.

        published: whether new weights were sent; if not, the version is an alias of the last ones that were, or the
        engines go on serving an older one. What they serve then is told to `take_groups`; whoever gives them the alias
        does so before this. Raises UserError, and changes nothing, where a curriculum fails.
        """
        self.ready(step)
        if change := self.shares.change(step):
            self._journal("shares", **change)
        groups = self._edge.release(step)
        left = self._edge.num_live - self._edge.num_waiting
        assert self.plan.max_staleness or not left, "at staleness 0 a step leaves nothing behind that has started"
        numbers = [group.prompt_group.group_id for group in groups]
        self._counts.consume(group.prompt_group for group in groups)
        self._admission.released()
        self.version = Version(self._restart, step + 1)
        self.weights_step = step + 1 if published else self.weights_step
        self._journal("consumed", step=step, group_ids=numbers, tokens=sum(group.num_tokens for group in groups))
        self._journal("version", step=step + 1, weights=self.weights_step)
        if self._ledger:
            self._ledger.sync()
        self._check()
        self._cut = self._describe()
        return self.version

    def checked_counts(self) -> GroupCounts:
        return self._counts.group_counts(self._edge.num_running, self._edge.num_complete)

    def snapshot(self) -> Snapshot:
        """JSON to go on from. The cut is the last release (or the start), whatever has happened since."""
        return self._cut

    def _close_at_end(self) -> None:
        if self.prompt_groups.data_open and self.prompt_groups.num_left == 0:
            self._edge.close()

    def _issue_next(self, source: int, served: int) -> PromptGroup | None:
        """The next of the source that is not passed over; None where the data end before. Where a whole round would be,
        the row behind it is taken: no source runs empty."""
        num_left = self.plan.sources[source].num_rows
        while self.prompt_groups.num_left != 0:
            prompt_group = self.prompt_groups.make(source, served)
            self._edge.issue(prompt_group)
            self._counts.issue(prompt_group)
            self._journal("issued", **issued_fields(prompt_group))
            reason = self._skips.pass_over(prompt_group.row)
            if reason is None or not num_left:
                return prompt_group
            num_left -= 1
            self.drop(prompt_group.group_id, reason)
        return None

    def _reissue(self, number: int, served: int) -> PromptGroup:
        if self._edge.was_aborted(number):
            self._admission.issued([*self._edge.lanes.values()].index(self._edge.lane_of(number)), served)
        prompt_group = self._edge.reissue(number, served)
        self._journal("issued", **issued_fields(prompt_group))
        return prompt_group

    def _restore(self, groups: list[Group]) -> None:
        complete = [group for group in groups if group.complete]
        fit, stale = list[Group](), list[Group]()
        for number, source in enumerate(self.plan.sources):
            own = [group for group in complete if domain_of(group.prompt_group.stream) == source.name]
            parts = still_consumable(own, self.plan.max_staleness, partial(self.shares.quotas.up_to, number))
            fit += parts[0]
            stale += parts[1]
        running = [group for group in groups if not group.complete]
        lost = [group for group in running if group.prompt_group.row >= self.plan.num_rows]
        for group in [*fit, *(group for group in running if group not in lost)]:
            self._edge.restore(group)
        for group, reason in [*((group, STALE) for group in stale), *((group, LOST) for group in lost)]:
            self._journal("dropped", group_id=group.prompt_group.group_id, reason=reason)
            self._counts.drop(group.prompt_group, reason)

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
            "live": [saved(group) for group in self._edge.live],
            "ledger": cast(SavedMark, asdict(self._ledger.mark())) if self._ledger else None,
        }
        if counts.aborted:
            described["aborted"], described["aborted_tokens"] = counts.aborted, counts.aborted_tokens
        if self.plan.domains:
            described["domains"] = counts.saved_domains(self.shares.lags())
        if self.plan.skips:
            described["skips"] = self._skips.saved()
        if (curriculum := self.shares.curriculum) is not None:
            described["shares"], described["curriculum"] = self.shares.saved(), curriculum
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
    """Where the ledger stood at the snapshot's cut: what a `Ledger` is to be rolled back to."""
    return Mark(**snapshot["ledger"]) if snapshot["ledger"] else None
