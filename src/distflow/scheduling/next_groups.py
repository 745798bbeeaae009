"""Counts of a run's groups, in total and by domain, and the next group: of an offered row, else of the data set."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from distflow.scheduling.data_order import place
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.groups import DomainCounts, GroupCounts, PromptGroup, stream_of
from distflow.scheduling.snapshot import SavedDomain, Snapshot


class Counts:
    """The coordinator's own counts, which those of the ledger (`LedgerCounts`) must equal. Fields are as in
    `GroupCounts`."""

    def __init__(self, start: Snapshot) -> None:
        self.issued, self.consumed = start["issued"], start["consumed"]
        self.dropped = Counter(start["dropped"])
        self.aborted, self.aborted_tokens = start.get("aborted", 0), start.get("aborted_tokens", 0)
        self.domains = {
            name: DomainCounts(each["issued"], each["consumed"], each["dropped"], each.get("aborted", 0))
            for name, each in start.get("domains", {}).items()
            if each["issued"]
        }

    def issue(self, domain: str) -> None:
        """Count a group that was not issued before. domain: here and below empty in a run without domains."""
        self.issued += 1
        if domain:
            self.domains[domain] = replace(self.of(domain), issued=self.of(domain).issued + 1)

    def consume(self, domain: str) -> None:
        self.consumed += 1
        if domain:
            self.domains[domain] = replace(self.of(domain), consumed=self.of(domain).consumed + 1)

    def drop(self, domain: str, reason: str) -> None:
        self.dropped[reason] += 1
        if domain:
            before = self.of(domain).dropped
            self.domains[domain] = replace(self.of(domain), dropped={**before, reason: before.get(reason, 0) + 1})

    def abort(self, domain: str) -> None:
        self.aborted += 1
        if domain:
            self.domains[domain] = replace(self.of(domain), aborted=self.of(domain).aborted + 1)

    def of(self, domain: str) -> DomainCounts:
        return self.domains.get(domain, DomainCounts())

    def group_counts(self, running: int, complete: int) -> GroupCounts:
        return GroupCounts(
            issued=self.issued,
            running=running,
            complete=complete,
            consumed=self.consumed,
            dropped=dict(self.dropped),
            aborted=self.aborted,
            aborted_tokens=self.aborted_tokens,
            domains=dict(self.domains),
        )

    def saved_domains(self, lags: Mapping[str, str]) -> dict[str, SavedDomain]:
        """lags: of all domains, in their order."""
        saved: dict[str, SavedDomain] = {}
        for name, lag in lags.items():
            group_counts = self.of(name)
            counts = {
                "issued": group_counts.issued,
                "consumed": group_counts.consumed,
                "dropped": dict(group_counts.dropped),
            }
            aborted = {"aborted": group_counts.aborted} if group_counts.aborted else {}
            saved[name] = cast(SavedDomain, {**counts, **aborted, "lag": lag})
        return saved


class NextGroups:
    """num_offered: groups of offered rows so far. data_open: whether the data set still has groups."""

    def __init__(self, plan: DataPlan, counts: Counts, num_offered: int) -> None:
        """counts: of the run; the caller counts each group before it makes the next."""
        self._plan, self._counts = plan, counts
        self._num_known = self.num_offered = num_offered
        self._offered = deque[int]()  # rows that wait for rollout capacity
        self.data_open = True

    def offer(self) -> int:
        """A number for a row that is not in the data set. Not in a run with domains, which have all slots."""
        assert not self._plan.domains
        row = self._plan.num_rows + self._num_known
        self._num_known += 1
        self._offered.append(row)
        return row

    @property
    def num_waiting(self) -> int:
        """Rows that were offered and have no group yet."""
        return len(self._offered)

    @property
    def num_left(self) -> int | None:
        """Groups that may still be made; None for no bound."""
        if not self.data_open:
            return len(self._offered)
        if self._plan.total_groups is None:
            return None
        return len(self._offered) + max(0, self._plan.total_groups - self._num_drawn)

    def make(self, source: int, engine_version: int) -> PromptGroup:
        """The next new group of the source. engine_version: its version."""
        plan, number = self._plan, self._counts.issued
        if self._offered:
            self.num_offered += 1
            return PromptGroup(number, 0, self._offered.popleft(), plan.group_size, engine_version)
        if not plan.domains:
            epoch, row = place(self._num_drawn, plan.num_rows, plan.seed, plan.shuffle)
            return PromptGroup(number, epoch, row, plan.group_size, engine_version)
        domain = plan.domains[source]
        position = self._counts.of(domain.name).issued
        epoch, row = place(position, domain.num_rows, plan.seed, plan.shuffle, domain.name)
        row += sum(other.num_rows for other in plan.domains[:source])
        stream = stream_of(domain.name)
        return PromptGroup(
            number, epoch, row, domain.group_size or plan.group_size, engine_version, stream=stream, position=position
        )

    @property
    def _num_drawn(self) -> int:
        """Number of groups made of rows of the data set."""
        return self._counts.issued - self.num_offered
