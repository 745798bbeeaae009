"""The coordinator: issues groups, knows the state of every group, and decides when a step may be
consumed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any, cast

from distflow.scheduling.admission import Admission
from distflow.scheduling.data_plan import DataPlan, NextGroups, Timetable
from distflow.scheduling.domain_quotas import Quotas
from distflow.scheduling.group_states import (
    CountsError,
    GroupCounts,
    PromptGroup,
    Version,
    counts_by_domain,
)
from distflow.scheduling.ledger import STALE, Ledger, Mark
from distflow.scheduling.sample_queue import SampleQueue
from distflow.scheduling.scheduler_snapshot import (
    Snapshot,
    at_start,
    check_resumable,
    inherited_fields,
    restored,
    saved_counts,
    saved_group,
    saved_plan,
)

LOST = "lost"
"""The reason to drop a group of an offered row whose process ended, taking the row with it."""


class Coordinator:
    """Handles only metadata, without threads or locks: threads share it under a lock, processes
    through an actor.

    A group goes issue_groups → complete | drop | retry | abort; a step goes ready → release, which
    consumes its groups and ends in a new version. Every move is written to the ledger, except
    `retry`, which the next issue shows; an impossible one raises CountsError with the group. At
    staleness 0 every step consumes all groups that were issued for it, so the queue is empty after
    a release (except for aborted groups, and those of an earlier run with more staleness), and a
    resumed run repeats what an uninterrupted run would do. Otherwise groups stay in the queue, and
    the snapshot lists them.

    Each of several domains has its own order, epoch and position, and its slots in every step
    (`domain_quotas`): a new group comes from the domain of the first slot without a group, so a
    dropped group is replaced by one of its domain.

    Groups are made from rows of the data set and from offered rows, which have row numbers after
    the data set's, and come first (`NextGroups`).

    due: which of "save" and "validate" are due after the last release. queue: for questions about
    groups, and for `untake`, which the ledger does not record; all other moves are methods of the
    coordinator.

    Versions here are steps: version v is the weights after v steps, or the previous weights under a
    new number if nothing was updated. A step that changed weights without a weight sync leaves the
    engines at their version.
    """

    def __init__(
        self, plan: DataPlan, ledger: Ledger | None = None, snapshot: Snapshot | None = None
    ) -> None:
        """snapshot: resume from it, with a ledger that was rolled back to `mark_of(snapshot)`.
        Groups that were complete in it are complete (the caller has their batches), those that were
        running are issued first, and those issued after it are issued again, all with the same
        group ids. A group that died with its process has not failed: it uses up none of its three
        attempts.

        Staleness and batch size may differ from the snapshot's: complete groups that no step can
        consume in time are dropped as stale, and `queue.holds` is false for them. Raises UserError
        if the data or their order differ from the snapshot's.
        """
        start = snapshot or at_start(plan)
        check_resumable(plan, start)
        self.plan = plan
        if start.get("ended", {}).get("when") == str(plan.stop_when):
            self.plan = replace(plan, total_steps=start["step"])
        self._ledger = ledger
        self._restart = ledger.restart if ledger else start["restart"] + 1
        self.version = Version(self._restart, start["step"])

        # a resumed run first sends the weights that it resumes from
        self.weights_step = start["step"]
        self._counts = counts_by_domain(start)
        self.prompt_groups = NextGroups(
            plan, self._counts, start.get("offered", 0), start.get("sampler")
        )
        before = start.get("domains", {})
        self._quotas = Quotas(
            plan.consumer_batch,
            start["step"],
            plan.shares,
            [Fraction(before[source.name]["lag"]) for source in plan.sources] if before else None,
        )
        self._foreseen: list[PromptGroup] = []
        """The groups of the next step, as far as they are known."""
        self._foreseen_version = -1
        self.queue = SampleQueue(
            plan.consumer_batch,
            max_staleness=plan.max_staleness,
            next_step=self.step,
            when_exhausted=plan.when_exhausted,
            quotas=self._quotas,
            domains=[source.name for source in plan.sources],
            oversampling=plan.oversampling,
        )
        self._admission = Admission(plan, self.queue)

        quotas = {}
        for domain, share, lag in zip(
            plan.domains, self._quotas.shares, self._quotas.lags, strict=False
        ):
            quotas[domain.name] = {"share": str(share), "lag": str(lag)}

        self._journal(
            "plan",
            max_staleness=plan.max_staleness,
            consumer_batch=plan.consumer_batch,
            **({"quotas": quotas} if quotas else {}),
        )
        if ledger and ledger.inherits:
            self._journal("inherited", **inherited_fields(start))
        self._restore([restored(group) for group in start["live"]])
        self._close_at_end()
        num_passed = start["consumed"] + sum(start["dropped"].values())
        secs = start.get("secs", {})
        self._timetables = {
            name: Timetable(frequency, plan.num_rows, num_passed, secs.get(name, 0.0))
            for name, frequency in (("save", plan.saves), ("validate", plan.validates))
        }
        self.due: frozenset[str] = frozenset()
        self._cut = self._checked_snapshot()

    @property
    def step(self) -> int:
        """The next step to be consumed."""
        return self.version.step

    @property
    def finished(self) -> bool:
        """Whether no step is left: all were consumed, or the data ended and the queue is empty."""
        return self.step >= self.plan.total_steps or (self.queue.closed and not self.queue.num_live)

    def issue_groups(self, engine_version: int | None = None) -> list[PromptGroup]:
        """The groups to start now: lost ones that wait for another attempt, then new ones, each by
        group id. At staleness 0 they come in waves: none while the last wave runs or the step is
        full.

        engine_version: the lowest version of any engine, None for that of the last release. A
        version whose step is not released yet counts as the one before. Raises CountsError if
        versions go backwards, or ahead of the steps.
        """
        engine_version = self._admission.see(
            self.step if engine_version is None else engine_version
        )
        if self.finished:
            return []

        num_capacity = self._admission.rollout_capacity(engine_version)
        prompt_groups = [
            self._reissue(number, engine_version)
            for number in self._admission.waiting(engine_version, num_capacity)
        ]

        num_open = num_capacity - len(prompt_groups)
        sources = self._admission.new(engine_version, num_open, self.prompt_groups.num_left)
        prompt_groups += self._issue(sources, engine_version)
        self._close_at_end()
        if self.plan.oversampling:
            self.queue.give_places([group.group_id for group in prompt_groups])
        return [self.queue.prompt_group(group.group_id) for group in prompt_groups]

    def foresee(self) -> list[PromptGroup]:
        """The groups of the next step, if the current one is released as it stands now; empty if
        that is not known. Nothing is issued."""
        plan = self.plan
        queue = self.queue
        if plan.max_staleness or plan.oversampling or self.prompt_groups.offered or plan.sampler:
            return []

        is_whole = queue.num_complete == queue.num_live == plan.consumer_batch
        if not is_whole or self.step + 1 >= plan.total_steps:
            return []

        if self._foreseen_version != self.step + 1:
            self._foreseen_version = self.step + 1
            sources = self._admission.sources_after_next()
            self._foreseen = self.prompt_groups.next(sources, self._foreseen_version)

        return self._foreseen

    def assign(self, worker_of: Mapping[int, str]) -> None:
        """Record in the ledger which worker works on each of these groups from now on."""
        records = [{"group_id": number, "worker": name} for number, name in worker_of.items()]
        self._journal_all("assigned", records)

    def offer(self) -> int:
        """Add a row that is not in the data set; returns its number. Not allowed in a run with
        domains, which have all slots."""
        row = self.prompt_groups.offer()
        self.queue.closed = False
        return row

    def complete(
        self,
        number: int,
        num_tokens: int,
        version: int | None = None,
        score: float | None = None,
    ) -> None:
        """Note that a group has its rewards and passed all filters. num_tokens: of all its samples,
        prompts included. version: the lowest of any of their tokens, None for the group's. score:
        the mean of its responses."""
        group = self.queue.complete(number, num_tokens, version)
        self._note_score(group, score)
        self._journal("complete", **_complete_fields(group))

    def complete_all(self, num_tokens: Mapping[int, int]) -> None:
        """`complete` for groups that were loaded together. num_tokens: of each, by its number."""
        groups = [self.queue.complete(number, tokens) for number, tokens in num_tokens.items()]
        self._journal_all("complete", [_complete_fields(group) for group in groups])

    def weigh(self, number: int, num_bytes: int) -> None:
        """Note the size of a complete group, for `plan.max_held_bytes`."""
        self._admission.memory.weigh(number, num_bytes)

    def drop(self, number: int, reason: str, score: float | None = None) -> None:
        """Drop a group without training on it: its id is used up, and its rollout capacity is free
        again. score: the mean of its responses, if they were scored."""
        group = self.queue.drop(number, reason)
        self._note_score(group, score)
        self._journal("dropped", group_id=number, reason=reason)
        self._counts[group.domain].drop(reason)

    def retry(self, number: int) -> bool:
        """Retry a group that was lost during the run with the engine or process that worked on it.

        Returns whether it waits for `issue_groups` to issue it again. If not, this was its third
        attempt and it is dropped as max_retries.
        """
        waits = self.queue.retry(number)
        if not waits:
            self.drop(number, "max_retries")
        return waits

    def abort(self, numbers: Sequence[int]) -> None:
        """Note that running groups that are no longer needed were aborted, and wait to be issued
        again."""
        groups = [self.queue.abort(number) for number in numbers]
        self._journal("aborted", group_ids=list(numbers))
        for group in groups:
            self._counts[group.domain].aborted += 1

    def lose(self, number: int) -> None:
        """Note that a complete group that no step has taken was lost with the process that held its
        samples: it waits to be issued again, which uses up none of its three attempts."""
        self.queue.lose(number)
        self._journal("lost", group_id=number)

    def ready(self, step: int) -> tuple[int, ...] | None:
        """Ids of the groups that form `step`, ascending, or None while it waits for groups; see
        `SampleQueue.ready` for short steps. Raises Exhausted, and CountsError if one of its groups
        is staler than
        the plan allows."""
        numbers = self.queue.ready(step, exhausted=self._admission.is_spent(self.weights_step))
        if numbers is None and self._admission.is_stuck(self.weights_step):
            raise CountsError(
                f"step {step + 1} can get no groups: the engines have weights of version "
                f"{self._admission.engine_version}, max_staleness is {self.plan.max_staleness}, "
                "and no later version was sent"
            )

        return numbers

    def part(self, step: int, wanted: int) -> tuple[int, ...] | None:
        """Ids of `wanted` more groups of a step that is taken in parts, ascending; see
        `SampleQueue.part`.

        Such a step must have taken all groups that it owes (`queue.num_owed`) when it is released.
        """
        exhausted = self.queue.num_taken == 0 and self._admission.is_spent(self.weights_step)
        return self.queue.part(step, wanted, exhausted)

    @property
    def stalled(self) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is
        offered."""
        return self._admission.is_stalled(self.prompt_groups.num_left)

    def release(self, step: int, sent_weights: bool = True) -> Version:
        """Consume the step, which ends in a new version; it is on disk when this returns. Counts
        are checked.

        sent_weights: whether new weights were sent; if not, the version stands for the weights sent
        last, or the engines keep an older one. `issue_groups` gets their version, which the caller
        sets before this call.
        """
        groups = self.queue.release(step)
        left = self.queue.num_live - self.queue.num_waiting
        assert self.plan.max_staleness or not left, (
            "at staleness 0 a step leaves nothing behind that has started"
        )
        numbers = [group.group_id for group in groups]
        for group in groups:
            self._counts[group.domain].consumed += 1
        self._admission.released()
        self.version = Version(self._restart, step + 1)

        if sent_weights:
            self.weights_step = step + 1
        if self.prompt_groups.sampler is not None:
            self.prompt_groups.sampler.end_step(self.step)

        self._journal(
            "consumed",
            step=self.step,
            group_ids=numbers,
            tokens=sum(group.num_tokens for group in groups),
        )
        self._journal("version", step=self.step, weights=self.weights_step)
        if self._ledger:
            self._ledger.sync()
        passed = sum(each.consumed + sum(each.dropped.values()) for each in self._counts.values())
        last = self.finished
        self.due = frozenset(
            name for name, each in self._timetables.items() if each.is_due(self.step, passed, last)
        )
        self._cut = self._checked_snapshot()

        return self.version

    def end(self, why: str) -> None:
        """End the run after the last release, because a metric meets `plan.stop_when`. A run that
        resumes with the same condition has ended too. why: for the user."""
        self._cut["ended"] = {"when": str(self.plan.stop_when), "why": why}
        self.plan = replace(self.plan, total_steps=self.step)

    def checked_counts(self) -> GroupCounts:
        """Raises CountsError if groups are missing."""
        queue = self.queue
        counts = GroupCounts.of(self._counts, queue.num_running, queue.num_complete)
        counts.check()
        return counts

    def snapshot(self) -> Snapshot:
        """JSON to resume from: the state at the last release (or the start), whatever has happened
        since."""
        return self._cut

    def _note_score(self, group: PromptGroup, score: float | None) -> None:
        if self.prompt_groups.sampler is not None:
            self.prompt_groups.sampler.note(group.group_id, group.row, score)

    def _close_at_end(self) -> None:
        self.queue.closed |= self.prompt_groups.data_open and self.prompt_groups.num_left == 0

    def _issue(self, sources: Sequence[int], engine_version: int) -> list[PromptGroup]:
        """Issue a new group of each source; fewer if the data end."""
        groups = self.prompt_groups.next(sources, engine_version)
        for group, source in zip(groups, sources, strict=False):
            self.queue.issue(group)
            self._admission.issued(source, engine_version)
            self._counts[group.domain].issued += 1

        self._journal_all("issued", [group.issued_fields() for group in groups])
        return groups

    def _reissue(self, number: int, engine_version: int) -> PromptGroup:
        if self.queue.prompt_group(number).num_aborts:
            self._admission.issued(self.queue.queue_of(number).domain, engine_version)
        prompt_group = self.queue.reissue(number, engine_version)
        self._journal("issued", **prompt_group.issued_fields())
        return prompt_group

    def _restore(self, groups: list[PromptGroup]) -> None:
        """Restore complete groups by due step, as many of each domain as fit into the steps up to
        it; drop the others as stale."""
        max_staleness, num_fit = self.plan.max_staleness, Counter[str]()
        for group in sorted(groups, key=lambda group: (group.due(max_staleness), group.group_id)):
            slots = self._quotas.up_to(
                self.queue.domain_queues[group.domain].domain, group.due(max_staleness)
            )

            reason = None
            if not group.complete:
                reason = LOST if group.row >= self.plan.num_rows else None
            elif num_fit[group.domain] < slots:
                num_fit[group.domain] += 1
            else:
                reason = STALE

            if reason is None:
                self.queue.restore(group)
                continue

            self._journal("dropped", group_id=group.group_id, reason=reason)
            self._counts[group.domain].drop(reason)

    def _checked_snapshot(self) -> Snapshot:
        counts = self.checked_counts()
        described: dict[str, Any] = {
            "plan": saved_plan(self.plan),
            "restart": self._restart,
            "step": self.step,
            "offered": self.prompt_groups.num_offered,
            **saved_counts(counts),
            "live": [saved_group(group) for group in self.queue.live],
            "ledger": asdict(self._ledger.mark()) if self._ledger else None,
        }
        if self.plan.domains:
            domains = {}
            for domain, lag in zip(self.plan.domains, self._quotas.lags, strict=True):
                domains[domain.name] = {**saved_counts(self._counts[domain.name]), "lag": str(lag)}
            described["domains"] = domains

        if self.prompt_groups.sampler is not None:
            described["sampler"] = self.prompt_groups.sampler.saved()
        if self.plan.saves.secs or self.plan.validates.secs:
            described["secs"] = {name: each.secs for name, each in self._timetables.items()}
        return cast(Snapshot, described)

    def _journal_all(self, kind: str, fields: Sequence[Mapping[str, object]]) -> None:
        if self._ledger:
            self._ledger.append_all(kind, fields, as_one=self.plan.loads_rows)

    def _journal(self, kind: str, **fields: object) -> None:
        if self._ledger:
            self._ledger.append(kind, **fields)


def _complete_fields(group: PromptGroup) -> dict[str, Any]:
    return {"group_id": group.group_id, "tokens": group.num_tokens, "version": group.lowest_version}


def mark_of(snapshot: Snapshot) -> Mark | None:
    """The ledger's position at the snapshot, to which a `Ledger` is rolled back."""
    if snapshot["ledger"]:
        return Mark(**snapshot["ledger"])
    return None
