"""Counts tickets from journal records alone: the second bookkeeping, which the coordinator's must equal."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from distflow.flow.account import Account, AccountingError, DomainAccount
from distflow.flow.record import Record

STALE = "stale"
"""Why a complete group is dropped: the run goes on with a bound that it would break."""


class _State(IntEnum):
    UNKNOWN = 0
    RUNNING = 1
    COMPLETE = 2
    CONSUMED = 3
    DROPPED = 4
    SETTLED = 5
    """Consumed or dropped in another run's journal, of which only the counts were inherited."""


@dataclass
class _Domain:
    """As `DomainAccount`."""

    issued: int = 0
    consumed: int = 0
    aborted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Tally:
    """Applies the records of one surviving timeline in order. One byte a ticket.

    Records that concern no training ticket are passed over.
    """

    def __init__(self) -> None:
        self.next_step = 0
        self._states = bytearray()
        self._attempts: dict[int, int] = {}
        self._counts: Counter[_State] = Counter()
        self._dropped: Counter[str] = Counter()
        self._num_aborted = self._num_aborted_tokens = 0
        self._domains: dict[str, _Domain] = {}
        self._domain_of: dict[int, str] = {}  # of tickets on the edge
        self._apply: dict[str, Callable[[Record], None]] = {
            "issued": self._issued,
            "complete": lambda record: self._move(record["ticket"], _State.RUNNING, _State.COMPLETE),
            "lost": lambda record: self._move(record["ticket"], _State.COMPLETE, _State.RUNNING),
            "dropped": self._dropped_one,
            "aborted": self._aborted,
            "consumed": self._consumed,
            "inherited": self._inherited,
        }

    @property
    def account(self) -> Account:
        counts = self._counts
        return Account(
            issued=len(self._states),
            running=counts[_State.RUNNING],
            complete=counts[_State.COMPLETE],
            consumed=counts[_State.CONSUMED],
            dropped=dict(self._dropped),
            aborted=self._num_aborted,
            aborted_tokens=self._num_aborted_tokens,
            domains={
                name: DomainAccount(counts.issued, counts.consumed, dict(counts.dropped), counts.aborted)
                for name, counts in self._domains.items()
            },
        )

    def apply(self, record: Record) -> None:
        """Raises AccountingError naming the ticket that the record moves as no run can."""
        apply = self._apply.get(record["kind"])
        if apply is not None:
            apply(record)

    def _issued(self, record: Record) -> None:
        number, attempt = record["ticket"], record["attempt"]
        if number == len(self._states):
            self._states.append(_State.RUNNING)
            self._counts[_State.RUNNING] += 1
            if "domain" in record:
                self._domain_of[number] = record["domain"]
                self._domains.setdefault(record["domain"], _Domain()).issued += 1
        elif number > len(self._states):
            raise AccountingError(f"ticket {number} was issued, but {len(self._states)} is the next one")
        elif self._states[number] != _State.RUNNING or attempt <= self._attempts[number]:
            state = _State(self._states[number]).name.lower()
            raise AccountingError(f"ticket {number} was issued twice: it is {state}, attempt {attempt}")
        self._attempts[number] = attempt

    def _dropped_one(self, record: Record) -> None:
        source = _State.COMPLETE if record["reason"] == STALE else _State.RUNNING
        self._move(record["ticket"], source, _State.DROPPED)
        self._dropped[record["reason"]] += 1
        if record["ticket"] in self._domain_of:
            self._domains[self._domain_of.pop(record["ticket"])].dropped[record["reason"]] += 1

    def _aborted(self, record: Record) -> None:
        for number in record["tickets"]:
            self._move(number, _State.RUNNING, _State.RUNNING)
            if number in self._domain_of:
                self._domains[self._domain_of[number]].aborted += 1
        self._num_aborted += len(record["tickets"])
        self._num_aborted_tokens += record["tokens"]

    def _consumed(self, record: Record) -> None:
        if record["step"] != self.next_step:
            raise AccountingError(f"step {record['step']} was consumed, but {self.next_step} is the next one")
        for number in record["tickets"]:
            self._move(number, _State.COMPLETE, _State.CONSUMED)
            if number in self._domain_of:
                self._domains[self._domain_of.pop(number)].consumed += 1
        self.next_step += 1

    def _inherited(self, record: Record) -> None:
        if self._states:
            raise AccountingError(f"an account was inherited after {len(self._states)} tickets had been issued")
        self.next_step = record["step"]
        self._states = bytearray([_State.SETTLED]) * record["issued"]
        self._counts = Counter({_State.CONSUMED: record["consumed"]})
        self._dropped = Counter(record["dropped"])
        self._num_aborted, self._num_aborted_tokens = record.get("aborted", 0), record.get("aborted_tokens", 0)
        self._domains = {
            name: _Domain(counts["issued"], counts["consumed"], counts.get("aborted", 0), Counter(counts["dropped"]))
            for name, counts in record.get("domains", {}).items()
        }
        for group in record.get("live", ()):
            state = _State.COMPLETE if group["complete"] else _State.RUNNING
            self._states[group["ticket"]] = state
            self._counts[state] += 1
            self._attempts[group["ticket"]] = group["attempt"]
            if "domain" in group:
                self._domain_of[group["ticket"]] = group["domain"]

    def _move(self, number: int, source: _State, target: _State) -> None:
        state = _State(self._states[number]) if number < len(self._states) else _State.UNKNOWN
        if state != source:
            raise AccountingError(
                f"ticket {number} cannot become {target.name.lower()}: it is {state.name.lower()}, not "
                f"{source.name.lower()}"
            )
        self._states[number] = target
        self._counts[source] -= 1
        self._counts[target] += 1
        if target in (_State.CONSUMED, _State.DROPPED):
            del self._attempts[number]
