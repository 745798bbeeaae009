"""Counts the groups of a ledger from its records, independently of the coordinator that wrote
them."""

from collections import Counter, defaultdict
from enum import IntEnum
from pathlib import Path

from distflow.scheduling.group_states import (
    CountsError,
    DomainCounts,
    GroupCounts,
    counts_by_domain,
)
from distflow.scheduling.ledger import STALE, Record, timeline


def counted(path: Path) -> GroupCounts:
    """The counts of a ledger that may end within a step. Raises CountsError for an impossible
    move."""
    counts = LedgerCounts()
    for _, record in timeline(path):
        counts.apply(record)
    return counts.group_counts


class _State(IntEnum):
    """A `GroupState` as a byte, by its word; a group that waits to be issued again counts as
    generating."""

    UNKNOWN = 0
    GENERATING = 1
    QUEUED = 2
    TRAINED = 3
    DROPPED = 4
    SETTLED = 5
    """Trained or dropped in another run's ledger; only the counts were inherited."""


class LedgerCounts:
    """Counts groups, one byte each; a record that moves one in an impossible way is an error."""

    def __init__(self) -> None:
        self.last_step = 0
        self._states = bytearray()
        self._attempts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}  # of complete groups in the queue
        self._counts: Counter[_State] = Counter()
        self._domains = defaultdict[str, DomainCounts](DomainCounts)
        self._domain_of: dict[int, str] = {}  # domains of groups in the queue, if there are domains

    def apply(self, record: Record) -> None:
        """Apply the next record of a surviving timeline. Raises CountsError with the group or the
        step."""
        if (apply := getattr(self, f"on_{record['kind']}", None)) is not None:
            apply(record)

    @property
    def group_counts(self) -> GroupCounts:
        running = self._counts[_State.GENERATING]
        complete = self._counts[_State.QUEUED]
        return GroupCounts.of(self._domains, running, complete)

    def on_issued(self, record: Record) -> None:
        number = record["group_id"]
        attempt = record["attempt"]
        domain = record.get("domain", "")

        if number == len(self._states):
            self._states.append(_State.GENERATING)
            self._counts[_State.GENERATING] += 1
            if domain:
                self._domain_of[number] = domain
            self._domains[domain].issued += 1
        elif number > len(self._states):
            raise CountsError(f"group {number} was issued, but {len(self._states)} is the next one")
        elif self._states[number] != _State.GENERATING or attempt <= self._attempts[number]:
            state = _State(self._states[number]).name.lower()
            raise CountsError(f"group {number} was issued twice: it is {state}, attempt {attempt}")

        self._attempts[number] = attempt

    def on_complete(self, record: Record) -> None:
        self._move(record["group_id"], _State.GENERATING, _State.QUEUED)
        self._tokens[record["group_id"]] = record["tokens"]

    def on_lost(self, record: Record) -> None:
        self._move(record["group_id"], _State.QUEUED, _State.GENERATING)

    def on_dropped(self, record: Record) -> None:
        source = _State.QUEUED if record["reason"] == STALE else _State.GENERATING
        self._move(record["group_id"], source, _State.DROPPED)
        self._domains[self._domain_of.pop(record["group_id"], "")].drop(record["reason"])

    def on_aborted(self, record: Record) -> None:
        for number in record["group_ids"]:
            self._move(number, _State.GENERATING, _State.GENERATING)
            self._domains[self._domain_of.get(number, "")].aborted += 1

    def on_consumed(self, record: Record) -> None:
        if record["step"] != self.last_step + 1:
            raise CountsError(
                f"step {record['step']} was consumed, but {self.last_step + 1} is the next one"
            )

        known = [self._tokens[number] for number in record["group_ids"] if number in self._tokens]
        if len(known) == len(record["group_ids"]) and record.get("tokens", sum(known)) != sum(
            known
        ):
            raise CountsError(
                f"step {record['step']} consumed {record['tokens']} tokens, but its groups have "
                f"{sum(known)}"
            )

        for number in record["group_ids"]:
            self._move(number, _State.QUEUED, _State.TRAINED)
            self._domains[self._domain_of.pop(number, "")].consumed += 1

        self.last_step += 1

    def on_inherited(self, record: Record) -> None:
        if self._states:
            raise CountsError(
                f"counts were inherited after {len(self._states)} groups had been issued"
            )

        self.last_step = record["step"]
        self._states = bytearray([_State.SETTLED]) * record["issued"]
        self._domains = counts_by_domain(record)

        for group in record.get("live", ()):
            state = _State.QUEUED if group["complete"] else _State.GENERATING
            self._states[group["group_id"]] = state
            self._counts[state] += 1
            self._attempts[group["group_id"]] = group["attempt"]
            if "domain" in group:
                self._domain_of[group["group_id"]] = group["domain"]

    def _move(self, number: int, source: _State, target: _State) -> None:
        state = self._states[number] if number < len(self._states) else _State.UNKNOWN
        if state != source:
            found = _State(state).name.lower()
            raise CountsError(
                f"group {number} cannot become {target.name.lower()}: it is {found}, "
                "not "
                f"{source.name.lower()}"
            )

        self._states[number] = target
        self._counts[source] -= 1
        self._counts[target] += 1
        self._tokens.pop(number, None)
        if target in (_State.TRAINED, _State.DROPPED):
            del self._attempts[number]
