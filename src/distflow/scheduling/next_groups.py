"""The next group of a run: of an offered row, else of the data set."""

from collections import defaultdict, deque

from distflow.scheduling.data_order import place
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.groups import TRAIN, DomainCounts, PromptGroup


class NextGroups:
    """num_offered: groups of offered rows so far. data_open: whether the data set still has groups."""

    def __init__(self, plan: DataPlan, counts: defaultdict[str, DomainCounts], num_offered: int) -> None:
        """counts: of the run, by domain; the caller counts each group before it makes the next."""
        self._plan, self._counts = plan, counts
        self.num_offered = num_offered
        self._offered = deque[int]()  # rows that wait for rollout capacity
        self.data_open = True

    def offer(self) -> int:
        """A number for a row that is not in the data set. Not in a run with domains, which have all slots."""
        assert not self._plan.domains
        row = self._plan.num_rows + self.num_offered + len(self._offered)
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
        plan, number = self._plan, self._num_issued
        if self._offered:
            self.num_offered += 1
            return PromptGroup(number, 0, self._offered.popleft(), plan.group_size, engine_version)
        if not plan.domains:
            epoch, row = place(self._num_drawn, plan.num_rows, plan.seed, plan.shuffle)
            return PromptGroup(number, epoch, row, plan.group_size, engine_version)
        domain = plan.domains[source]
        position = self._counts[domain.name].issued
        epoch, row = place(position, domain.num_rows, plan.seed, plan.shuffle, domain.name)
        row += sum(other.num_rows for other in plan.domains[:source])
        size, stream = domain.group_size or plan.group_size, f"{TRAIN}/{domain.name}"
        return PromptGroup(number, epoch, row, size, engine_version, stream=stream, position=position)

    @property
    def _num_issued(self) -> int:
        return sum(counts.issued for counts in self._counts.values())

    @property
    def _num_drawn(self) -> int:
        """Number of groups made of rows of the data set."""
        return self._num_issued - self.num_offered
