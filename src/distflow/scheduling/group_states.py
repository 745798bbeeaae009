"""Prompt groups and their states, weight versions, and counts: every issued group is in one
state."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

TRAIN = "train"
MAX_ABORTS = 3
"""How often a group may be aborted before a place in the step is reserved for it, for which the
step waits."""


@dataclass(frozen=True, order=True)
class Version:
    """The weights after a step, ordered lexicographically: each resume raises the restart
    number."""

    restart: int
    step: int


class GroupState(StrEnum):
    """waiting: to be issued again, after it was lost or aborted. generating: with a rollout worker,
    until it is scored and filtered. queued: complete. training: taken by the step that trains now.
    The others have left the queue.

    In the ledger a training group is queued until the step is consumed."""

    WAITING = "waiting"
    GENERATING = "generating"
    QUEUED = "queued"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True)
class PromptGroup:
    """One prompt group, numbered globally, independent of the number of workers.

    The first fields identify it: two records of one issue are equal. The others are the scheduler's
    knowledge of it, from its issue to the step that trains on it; the scheduler replaces the record
    when one changes, and a rollout worker has the record from the issue.

    group_id: position in the run's data order, from 0. epoch, row: the row of the data set, and the
    pass over it. group_size: samples of the prompt. version: of the engine's weights when the group
    was issued. attempt: raised each time that the group restarts, after a crash or an abort.
    stream: "train", "train/<domain>", or "val/<set>". position: in the order of its domain, from 0;
    always 0 in a run without domains. num_tokens: of all its samples, prompts included; 0 until it
    is complete. failures, num_aborts: how often it was lost during the run, and aborted. counts:
    whether its worker may complete one more group of its domain for it, with oversampling.
    lowest_version: of its tokens, None until it is complete.
    """

    group_id: int
    epoch: int
    row: int
    group_size: int
    version: int
    attempt: int = 0
    stream: str = TRAIN
    position: int = 0
    state: GroupState = field(default=GroupState.GENERATING, compare=False)
    num_tokens: int = field(default=0, compare=False)
    failures: int = field(default=0, compare=False)
    lowest_version: int | None = field(default=None, compare=False)
    num_aborts: int = field(default=0, compare=False)
    counts: bool = field(default=False, compare=False)

    @property
    def domain(self) -> str:
        """Empty in a run without domains."""
        return self.stream.partition("/")[2] if self.stream != TRAIN else ""

    def changed(self, **changes: Any) -> "PromptGroup":
        """A changed record. `dataclasses.replace`, run three times per group, would take several
        times as long."""
        record = object.__new__(PromptGroup)
        record.__dict__.update(self.__dict__, **changes)
        return record

    @property
    def complete(self) -> bool:
        """Whether its samples are in the queue, or with the step that took it."""
        return self.state in (GroupState.QUEUED, GroupState.TRAINING)

    def due(self, max_staleness: int) -> int:
        """The last step that may train on it. Tokens from weights older than the group's are a
        fault, and make it due earlier."""
        lowest = (
            self.version if self.lowest_version is None else min(self.version, self.lowest_version)
        )
        return max_staleness + lowest

    def issued_fields(self) -> dict[str, Any]:
        """Fields of the ledger's record of its issue."""
        fields: dict[str, Any] = {
            "group_id": self.group_id,
            "epoch": self.epoch,
            "row": self.row,
            "version": self.version,
            "attempt": self.attempt,
        }
        if self.domain:
            fields["domain"] = self.domain
        return fields


class Places:
    """The slots in a step for a worker's groups of one generation batch, by domain. Groups that
    were aborted too often have a reserved slot."""

    def __init__(self, groups: Collection[PromptGroup]) -> None:
        self._reserved = {group for group in groups if group.num_aborts >= MAX_ABORTS}
        self._free = Counter(group.domain for group in groups if group.counts)

    @property
    def is_full(self) -> bool:
        return not any(self._free.values())

    def has_place(self, group: PromptGroup) -> bool:
        """Whether the group may be completed, beside the slots reserved for others."""
        others = (
            0
            if group in self._reserved
            else sum(each.domain == group.domain for each in self._reserved)
        )
        return self._free[group.domain] > others

    def end(self, group: PromptGroup, complete: bool) -> None:
        """End a group: it is complete and takes a place, or it is dropped."""
        self._reserved.discard(group)
        self._free[group.domain] -= complete


class CountsError(RuntimeError):
    """A group was lost, duplicated, or moved in an impossible way: a bug. The message names the
    group."""


@dataclass
class DomainCounts:
    """Counts of one domain: issued, consumed, and dropped (by reason) groups. aborted: as in
    `GroupCounts`."""

    issued: int = 0
    consumed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    aborted: int = 0

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def counts_by_domain(saved: Mapping[str, Any]) -> defaultdict[str, DomainCounts]:
    """The counts in a snapshot, or in the ledger's record `inherited`. A run without domains has
    one, named ""."""
    domains = saved.get("domains") or {"": saved}
    return defaultdict(
        DomainCounts,
        {
            name: DomainCounts(
                each["issued"], each["consumed"], dict(each["dropped"]), each.get("aborted", 0)
            )
            for name, each in domains.items()
        },
    )


@dataclass(frozen=True)
class GroupCounts:
    """Numbers of groups by state. running: waiting or generating. complete: queued or training.
    consumed: trained. dropped: counts by reason. aborted: how often a group was aborted because its
    step was full, so that it waits to be issued again. domains: counts of each with an issued
    group; empty without domains."""

    issued: int = 0
    running: int = 0
    complete: int = 0
    consumed: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    aborted: int = 0
    domains: Mapping[str, DomainCounts] = field(default_factory=dict)

    @staticmethod
    def of(domains: Mapping[str, DomainCounts], running: int, complete: int) -> "GroupCounts":
        """The sums of the domains' counts, with a copy of these."""
        dropped = Counter[str]()
        for counts in domains.values():
            dropped.update(counts.dropped)
        return GroupCounts(
            sum(counts.issued for counts in domains.values()),
            running,
            complete,
            sum(counts.consumed for counts in domains.values()),
            dict(dropped),
            sum(counts.aborted for counts in domains.values()),
            {
                n: replace(counts, dropped={**counts.dropped})
                for n, counts in domains.items()
                if n and counts.issued
            },
        )

    def check(self) -> None:
        """Raises CountsError if a group is in no state or in two."""
        known = self.running + self.complete + self.consumed + sum(self.dropped.values())
        if self.issued != known:
            raise CountsError(
                f"{self.issued} groups were issued, but {known} are accounted for: {self}. Groups "
                "were lost or counted "
                "twice; after a resume, the checkpoint lacks those in flight: resume from an "
                "earlier one"
            )
