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
    """The state of a group. In the ledger a training group is queued until the step is consumed."""

    WAITING = "waiting"
    """To be issued again, after it was lost or aborted."""
    GENERATING = "generating"
    """With a rollout worker, until it is scored and filtered."""
    QUEUED = "queued"
    """Complete."""
    TRAINING = "training"
    """Taken by the step that trains now."""
    TRAINED = "trained"
    """It has left the queue, as if it was dropped."""
    DROPPED = "dropped"


@dataclass(frozen=True)
class PromptGroup:
    """One prompt group, numbered globally, independent of the number of workers.

    The first fields identify it: two records of one issue are equal. Those from `state` on are the
    scheduler's knowledge of it, from its issue to the step that trains on it; the scheduler
    replaces the record when one changes, and a rollout worker has the record from the issue.
    """

    group_id: int
    """Position in the run's data order, from 0."""
    epoch: int
    """The pass over the data set."""
    row: int
    """Of the data set."""
    group_size: int
    """Samples of the prompt."""
    version: int
    """Of the engine's weights when the group was issued."""
    attempt: int = 0
    """Raised each time that the group restarts, after a crash or an abort."""
    stream: str = TRAIN
    """"train", "train/<domain>", or "val/<set>"."""
    position: int = 0
    """In the order of its domain, from 0; always 0 in a run without domains."""
    state: GroupState = field(default=GroupState.GENERATING, compare=False)
    num_tokens: int = field(default=0, compare=False)
    """Of all its samples, prompts included; 0 until it is complete."""
    failures: int = field(default=0, compare=False)
    """How often it was lost during the run."""
    lowest_version: int | None = field(default=None, compare=False)
    """Of its tokens; None until it is complete."""
    num_aborts: int = field(default=0, compare=False)
    counts: bool = field(default=False, compare=False)
    """Whether its worker may complete one more group of its domain for it, with oversampling."""

    @property
    def domain(self) -> str:
        """Empty in a run without domains."""
        if self.stream != TRAIN:
            return self.stream.partition("/")[2]
        return ""

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
        if self.lowest_version is None:
            lowest = self.version
        else:
            lowest = min(self.version, self.lowest_version)
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
        others = 0
        if group not in self._reserved:
            others = sum(each.domain == group.domain for each in self._reserved)
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
    """Numbers of groups by state."""

    issued: int = 0
    running: int = 0
    """Waiting or generating."""
    complete: int = 0
    """Queued or training."""
    consumed: int = 0
    """Trained."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Counts by reason."""
    aborted: int = 0
    """How often a group was aborted because its step was full, so that it waits to be issued
    again."""
    domains: Mapping[str, DomainCounts] = field(default_factory=dict)
    """Counts of each with an issued group; empty without domains."""

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
                "were lost or counted twice; after a resume, the checkpoint lacks those in flight: "
                "resume from an earlier one"
            )
