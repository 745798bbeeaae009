"""Counts groups, and audits staleness, the order of versions and the shares of domains, from ledger records alone.

The counts must equal the coordinator's own.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction

from distflow.scheduling.domain_quotas import most_behind
from distflow.scheduling.groups import CountsError, DomainCounts, GroupCounts
from distflow.scheduling.ledger_record import Record

STALE = "stale"
"""Why a complete group is dropped: the run resumes with a bound that it would exceed."""


class _State(IntEnum):
    UNKNOWN = 0
    RUNNING = 1
    COMPLETE = 2
    CONSUMED = 3
    DROPPED = 4
    SETTLED = 5
    """Consumed or dropped in another run's ledger; only the counts were inherited."""


@dataclass
class _Domain:
    """Mutable `DomainCounts`."""

    issued: int = 0
    consumed: int = 0
    aborted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class LedgerCounts:
    """Applies the records of one surviving timeline in order. Uses one byte per group.

    Other records are skipped.
    """

    def __init__(self) -> None:
        self.last_step = 0
        self._states = bytearray()
        self._attempts: dict[int, int] = {}
        self._counts: Counter[_State] = Counter()
        self._dropped: Counter[str] = Counter()
        self._num_aborted = self._num_aborted_tokens = 0
        self._domains: dict[str, _Domain] = {}
        self._domain_of: dict[int, str] = {}  # of groups in the queue
        self._apply: dict[str, Callable[[Record], None]] = {
            "issued": self._issued,
            "complete": lambda record: self._move(record["group_id"], _State.RUNNING, _State.COMPLETE),
            "lost": lambda record: self._move(record["group_id"], _State.COMPLETE, _State.RUNNING),
            "dropped": self._dropped_one,
            "aborted": self._aborted,
            "consumed": self._consumed,
            "inherited": self._inherited,
        }

    @property
    def group_counts(self) -> GroupCounts:
        counts = self._counts
        return GroupCounts(
            issued=len(self._states),
            running=counts[_State.RUNNING],
            complete=counts[_State.COMPLETE],
            consumed=counts[_State.CONSUMED],
            dropped=dict(self._dropped),
            aborted=self._num_aborted,
            aborted_tokens=self._num_aborted_tokens,
            domains={
                name: DomainCounts(counts.issued, counts.consumed, dict(counts.dropped), counts.aborted)
                for name, counts in self._domains.items()
            },
        )

    def apply(self, record: Record) -> None:
        """Raises CountsError naming the group if the record moves it in an impossible way."""
        apply = self._apply.get(record["kind"])
        if apply is not None:
            apply(record)

    def _issued(self, record: Record) -> None:
        number, attempt = record["group_id"], record["attempt"]
        if number == len(self._states):
            self._states.append(_State.RUNNING)
            self._counts[_State.RUNNING] += 1
            if "domain" in record:
                self._domain_of[number] = record["domain"]
                self._domains.setdefault(record["domain"], _Domain()).issued += 1
        elif number > len(self._states):
            raise CountsError(f"group {number} was issued, but {len(self._states)} is the next one")
        elif self._states[number] != _State.RUNNING or attempt <= self._attempts[number]:
            state = _State(self._states[number]).name.lower()
            raise CountsError(f"group {number} was issued twice: it is {state}, attempt {attempt}")
        self._attempts[number] = attempt

    def _dropped_one(self, record: Record) -> None:
        source = _State.COMPLETE if record["reason"] == STALE else _State.RUNNING
        self._move(record["group_id"], source, _State.DROPPED)
        self._dropped[record["reason"]] += 1
        if record["group_id"] in self._domain_of:
            self._domains[self._domain_of.pop(record["group_id"])].dropped[record["reason"]] += 1

    def _aborted(self, record: Record) -> None:
        for number in record["group_ids"]:
            self._move(number, _State.RUNNING, _State.RUNNING)
            if number in self._domain_of:
                self._domains[self._domain_of[number]].aborted += 1
        self._num_aborted += len(record["group_ids"])
        self._num_aborted_tokens += record["tokens"]

    def _consumed(self, record: Record) -> None:
        if record["step"] != self.last_step + 1:
            raise CountsError(f"step {record['step']} was consumed, but {self.last_step + 1} is the next one")
        for number in record["group_ids"]:
            self._move(number, _State.COMPLETE, _State.CONSUMED)
            if number in self._domain_of:
                self._domains[self._domain_of.pop(number)].consumed += 1
        self.last_step += 1

    def _inherited(self, record: Record) -> None:
        if self._states:
            raise CountsError(f"counts were inherited after {len(self._states)} groups had been issued")
        self.last_step = record["step"]
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
            self._states[group["group_id"]] = state
            self._counts[state] += 1
            self._attempts[group["group_id"]] = group["attempt"]
            if "domain" in group:
                self._domain_of[group["group_id"]] = group["domain"]

    def _move(self, number: int, source: _State, target: _State) -> None:
        state = _State(self._states[number]) if number < len(self._states) else _State.UNKNOWN
        if state != source:
            raise CountsError(
                f"group {number} cannot become {target.name.lower()}: it is {state.name.lower()}, not "
                f"{source.name.lower()}"
            )
        self._states[number] = target
        self._counts[source] -= 1
        self._counts[target] += 1
        if target in (_State.CONSUMED, _State.DROPPED):
            del self._attempts[number]


class StalenessAudit:
    """Applies the records of one surviving timeline in order. `LedgerCounts` checks the groups' moves.

    The staleness of a group is the version that its step began with, `step - 1`, less the lowest one of its tokens.
    Older ledgers have no `plan`, so that staleness has no bound, and no version of complete groups, which then is the
    group's.
    """

    def __init__(self) -> None:
        self._max_staleness: int | None = None
        self._last_step = 0
        self._versions: dict[int, int] = {}  # of groups in the queue
        self._restart = -1
        self._engine_version = self._weights = 0  # lowest that may come next in this restart
        self._apply: dict[str, Callable[[Record], None]] = {
            "plan": self._plan,
            "issued": self._issued,
            "complete": self._complete,
            "dropped": self._dropped,
            "consumed": self._consumed,
            "version": self._version,
            "inherited": self._inherited,
        }

    def apply(self, record: Record) -> None:
        """Raises CountsError naming the group or the step."""
        if record["restart"] != self._restart:
            self._restart, self._engine_version, self._weights = record["restart"], 0, 0
        apply = self._apply.get(record["kind"])
        if apply is not None:
            apply(record)

    def _plan(self, record: Record) -> None:
        self._max_staleness = record["max_staleness"]

    def _issued(self, record: Record) -> None:
        version = record["version"]
        if not self._engine_version <= version <= self._last_step:
            raise CountsError(
                f"group {record['group_id']} was issued at version {version}, but {self._engine_version} was "
                f"there before and step {self._last_step} was the last one: versions never go backwards, nor ahead of "
                "the steps"
            )
        self._engine_version = version
        self._versions[record["group_id"]] = version

    def _complete(self, record: Record) -> None:
        if "version" in record:
            self._versions[record["group_id"]] = record["version"]

    def _dropped(self, record: Record) -> None:
        self._versions.pop(record["group_id"], None)

    def _consumed(self, record: Record) -> None:
        step, bound = record["step"], self._max_staleness
        for number in record["group_ids"]:
            version = self._versions.pop(number, None)
            if bound is not None and version is not None and not 0 <= step - 1 - version <= bound:
                raise CountsError(
                    f"step {step} consumed group {number}, which holds tokens of version {version}, but max_staleness "
                    f"was {bound}"
                )
        self._last_step = step

    def _version(self, record: Record) -> None:
        step, weights = record["step"], record["weights"]
        if step != self._last_step or not self._weights <= weights <= step:
            raise CountsError(
                f"version {step} with the weights of step {weights} was recorded, but step {self._last_step} ended and "
                f"the weights of step {self._weights} were there before: versions never go backwards"
            )
        self._weights = weights

    def _inherited(self, record: Record) -> None:
        self._last_step = record["step"]
        self._versions = {group["group_id"]: group["version"] for group in record.get("live", ()) if "version" in group}


_Shares = dict[str, Fraction]


class QuotaAudit:
    """Applies the records of one surviving timeline in order. `LedgerCounts` checks the groups' moves.

    After each step a domain has had its share of all slots to within less than one, plus the groups by which steps were
    short; if shares have changed, it is at most `most_behind` behind the sum of its shares over all slots. A plan has
    the lags to continue from; within one folder these must be the previous ones.
    """

    def __init__(self) -> None:
        self._batch = 0
        self._shares: _Shares = {}
        self._to_come: list[tuple[int, _Shares]] = []  # from which step on
        self._lags: dict[str, Fraction] = {}
        self._changed = False
        self._num_missing = 0
        self._domain_of: dict[int, str] = {}  # of groups in the queue
        self._apply: dict[str, Callable[[Record], None]] = {
            "plan": self._plan,
            "shares": self._change,
            "issued": self._issued,
            "dropped": self._dropped,
            "consumed": self._consumed,
            "inherited": self._inherited,
        }

    def apply(self, record: Record) -> None:
        """Raises CountsError naming the step and the domain."""
        apply = self._apply.get(record["kind"])
        if apply is not None:
            apply(record)

    def _plan(self, record: Record) -> None:
        quotas = record.get("quotas", {})
        lags = {name: Fraction(quota["lag"]) for name, quota in quotas.items()}
        if self._lags and not self._num_missing and lags != self._lags:
            raise CountsError(f"the domains were behind their shares by {self._lags}, but continued from {lags}")
        shares = {name: Fraction(quota["share"]) for name, quota in quotas.items()}
        self._changed |= bool(self._shares) and shares != self._shares
        self._changed |= any(abs(lag) >= 1 for lag in lags.values())
        self._batch, self._lags, self._num_missing = record["consumer_batch"], lags, 0
        self._shares, self._to_come = shares, []

    def _change(self, record: Record) -> None:
        shares = {name: Fraction(share) for name, share in record["shares"].items()}
        if shares.keys() != self._shares.keys() or sum(shares.values()) != 1 or min(shares.values()) < 0:
            raise CountsError(f"the shares from step {record['step']} on are not shares of the domains: {shares}")
        self._to_come = [change for change in self._to_come if change[0] < record["step"]]
        self._to_come.append((record["step"], shares))

    def _issued(self, record: Record) -> None:
        if "domain" in record:
            self._domain_of[record["group_id"]] = record["domain"]

    def _dropped(self, record: Record) -> None:
        self._forget(record["group_id"])

    def _consumed(self, record: Record) -> None:
        if not self._shares:
            return
        while self._to_come and self._to_come[0][0] <= record["step"]:
            self._shares, self._changed = self._to_come.pop(0)[1], True
        self._num_missing += self._batch - len(record["group_ids"])
        for name, share in self._shares.items():
            self._lags[name] += share * self._batch
        for number in record["group_ids"]:
            self._lags[self._forget(number)] -= 1
        for name, lag in self._lags.items():
            if not self._may_be(lag):
                raise CountsError(
                    f"after step {record['step']} the domain '{name}' is {float(lag):.2f} groups behind its share of "
                    f"{float(self._shares[name]):.3f}"
                )

    def _may_be(self, lag: Fraction) -> bool:
        if self._changed and lag > 0:
            return lag <= most_behind(len(self._lags)) + self._num_missing
        return abs(lag) < 1 + self._num_missing

    def _inherited(self, record: Record) -> None:
        self._domain_of = {group["group_id"]: group["domain"] for group in record.get("live", ()) if "domain" in group}

    def _forget(self, number: int) -> str:
        return self._domain_of.pop(number, "")
