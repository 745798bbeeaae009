"""The next ticket: of a row of the data set, in its order, or of one that somebody offers, which goes first."""

from collections import deque

from distflow.flow.counts import Counts
from distflow.flow.data_plan import DataPlan
from distflow.flow.order import place
from distflow.flow.ticket import Ticket, stream_of


class NextTickets:
    """num_offered: tickets that rows on offer had. data_open: whether there are tickets of the data set;
    they may not be wanted yet."""

    def __init__(self, plan: DataPlan, counts: Counts, num_offered: int) -> None:
        """counts: those of the run; who issues a ticket sees to it that it is counted before the next is made."""
        self._plan, self._counts = plan, counts
        self._num_known = self.num_offered = num_offered
        self._offered = deque[int]()  # rows that wait for a credit
        self.data_open = True

    def offer(self) -> int:
        """The number of a row that is not of the data set. Not of a run with domains, which have all places."""
        assert not self._plan.domains
        row = self._plan.num_rows + self._num_known
        self._num_known += 1
        self._offered.append(row)
        return row

    @property
    def num_waiting(self) -> int:
        """Rows that were offered and have no ticket yet."""
        return len(self._offered)

    @property
    def num_left(self) -> int | None:
        """Tickets that there still may be, None for no bound."""
        if not self.data_open:
            return len(self._offered)
        if self._plan.total_tickets is None:
            return None
        return len(self._offered) + max(0, self._plan.total_tickets - self._num_drawn)

    def make(self, source: int, served: int) -> Ticket:
        """The next new one of the source. served: the version that it names."""
        plan, number = self._plan, self._counts.issued
        if self._offered:
            self.num_offered += 1
            return Ticket(number, 0, self._offered.popleft(), plan.group_size, served)
        if not plan.domains:
            epoch, row = place(self._num_drawn, plan.num_rows, plan.seed, plan.shuffle)
            return Ticket(number, epoch, row, plan.group_size, served)
        domain = plan.domains[source]
        position = self._counts.of(domain.name).issued
        epoch, row = place(position, domain.num_rows, plan.seed, plan.shuffle, domain.name)
        row += sum(other.num_rows for other in plan.domains[:source])
        stream = stream_of(domain.name)
        return Ticket(
            number, epoch, row, domain.group_size or plan.group_size, served, stream=stream, position=position
        )

    @property
    def _num_drawn(self) -> int:
        """Tickets of rows of the data set."""
        return self._counts.issued - self.num_offered
