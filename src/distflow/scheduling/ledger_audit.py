"""Counts groups, and audits staleness, the order of versions and the shares of domains, from ledger records alone.

The counts must equal the coordinator's own.
"""

from collections import Counter, defaultdict
from enum import IntEnum
from fractions import Fraction

from distflow.scheduling.domain_quotas import most_behind
from distflow.scheduling.groups import CountsError, DomainCounts, GroupCounts, counts_by_domain
from distflow.scheduling.snapshot import Record

STALE = "stale"
"""Why a complete group is dropped: the run resumes with a bound that it would exceed."""


class _State(IntEnum):
    """A `GroupState` as a byte, by its word; a group that waits to be issued again counts as generating."""

    UNKNOWN = 0
    GENERATING = 1
    QUEUED = 2
    TRAINED = 3
    DROPPED = 4
    SETTLED = 5
    """Trained or dropped in another run's ledger; only the counts were inherited."""


class _Audit:
    """Applies the records of one surviving timeline in order, each by the method `on_KIND`; a record without one is
    skipped."""

    def apply(self, record: Record) -> None:
        """Raises CountsError naming the group, the step or the domain."""
        if (apply := getattr(self, f"on_{record['kind']}", None)) is not None:
            apply(record)


class LedgerCounts(_Audit):
    """Counts groups; a record that moves one in an impossible way is an error. Uses one byte per group."""

    def __init__(self) -> None:
        self.last_step = 0
        self._states = bytearray()
        self._attempts: dict[int, int] = {}
        self._counts: Counter[_State] = Counter()
        self._domains = defaultdict[str, DomainCounts](DomainCounts)
        self._domain_of: dict[int, str] = {}  # of groups in the queue, if there are domains
        self._num_aborted_tokens = 0

    @property
    def group_counts(self) -> GroupCounts:
        running, complete = self._counts[_State.GENERATING], self._counts[_State.QUEUED]
        return GroupCounts.of(self._domains, running, complete, self._num_aborted_tokens)

    def on_issued(self, record: Record) -> None:
        number, attempt = record["group_id"], record["attempt"]
        if number == len(self._states):
            self._states.append(_State.GENERATING)
            self._counts[_State.GENERATING] += 1
            if "domain" in record:
                self._domain_of[number] = record["domain"]
            self._domains[record.get("domain", "")].issued += 1
        elif number > len(self._states):
            raise CountsError(f"group {number} was issued, but {len(self._states)} is the next one")
        elif self._states[number] != _State.GENERATING or attempt <= self._attempts[number]:
            state = _State(self._states[number]).name.lower()
            raise CountsError(f"group {number} was issued twice: it is {state}, attempt {attempt}")
        self._attempts[number] = attempt

    def on_complete(self, record: Record) -> None:
        self._move(record["group_id"], _State.GENERATING, _State.QUEUED)

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
        self._num_aborted_tokens += record["tokens"]

    def on_consumed(self, record: Record) -> None:
        if record["step"] != self.last_step + 1:
            raise CountsError(f"step {record['step']} was consumed, but {self.last_step + 1} is the next one")
        for number in record["group_ids"]:
            self._move(number, _State.QUEUED, _State.TRAINED)
            self._domains[self._domain_of.pop(number, "")].consumed += 1
        self.last_step += 1

    def on_inherited(self, record: Record) -> None:
        if self._states:
            raise CountsError(f"counts were inherited after {len(self._states)} groups had been issued")
        self.last_step = record["step"]
        self._states = bytearray([_State.SETTLED]) * record["issued"]
        self._domains, self._num_aborted_tokens = counts_by_domain(record), record.get("aborted_tokens", 0)
        for group in record.get("live", ()):
            state = _State.QUEUED if group["complete"] else _State.GENERATING
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
        if target in (_State.TRAINED, _State.DROPPED):
            del self._attempts[number]


class StalenessAudit(_Audit):
    """Checks staleness and the order of versions; `LedgerCounts` checks the groups' moves.

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

    def apply(self, record: Record) -> None:
        if record["restart"] != self._restart:
            self._restart, self._engine_version, self._weights = record["restart"], 0, 0
        super().apply(record)

    def on_plan(self, record: Record) -> None:
        self._max_staleness = record["max_staleness"]

    def on_issued(self, record: Record) -> None:
        version = record["version"]
        if not self._engine_version <= version <= self._last_step:
            raise CountsError(
                f"group {record['group_id']} was issued at version {version}, but {self._engine_version} was "
                f"there before and step {self._last_step} was the last one: versions never go backwards, nor ahead of "
                "the steps"
            )
        self._engine_version = version
        self._versions[record["group_id"]] = version

    def on_complete(self, record: Record) -> None:
        if "version" in record:
            self._versions[record["group_id"]] = record["version"]

    def on_dropped(self, record: Record) -> None:
        self._versions.pop(record["group_id"], None)

    def on_consumed(self, record: Record) -> None:
        step, bound = record["step"], self._max_staleness
        for number in record["group_ids"]:
            version = self._versions.pop(number, None)
            if bound is not None and version is not None and not 0 <= step - 1 - version <= bound:
                raise CountsError(
                    f"step {step} consumed group {number}, which holds tokens of version {version}, but max_staleness "
                    f"was {bound}"
                )
        self._last_step = step

    def on_version(self, record: Record) -> None:
        step, weights = record["step"], record["weights"]
        if step != self._last_step or not self._weights <= weights <= step:
            raise CountsError(
                f"version {step} with the weights of step {weights} was recorded, but step {self._last_step} ended and "
                f"the weights of step {self._weights} were there before: versions never go backwards"
            )
        self._weights = weights

    def on_inherited(self, record: Record) -> None:
        self._last_step = record["step"]
        self._versions = {group["group_id"]: group["version"] for group in record.get("live", ()) if "version" in group}


_Shares = dict[str, Fraction]


class QuotaAudit(_Audit):
    """Checks the shares of domains; `LedgerCounts` checks the groups' moves.

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

    def on_plan(self, record: Record) -> None:
        quotas = record.get("quotas", {})
        lags = {name: Fraction(quota["lag"]) for name, quota in quotas.items()}
        if self._lags and not self._num_missing and lags != self._lags:
            raise CountsError(f"the domains were behind their shares by {self._lags}, but continued from {lags}")
        shares = {name: Fraction(quota["share"]) for name, quota in quotas.items()}
        self._changed |= bool(self._shares) and shares != self._shares
        self._changed |= any(abs(lag) >= 1 for lag in lags.values())
        self._batch, self._lags, self._num_missing = record["consumer_batch"], lags, 0
        self._shares, self._to_come = shares, []

    def on_shares(self, record: Record) -> None:
        shares = {name: Fraction(share) for name, share in record["shares"].items()}
        if shares.keys() != self._shares.keys() or sum(shares.values()) != 1 or min(shares.values()) < 0:
            raise CountsError(f"the shares from step {record['step']} on are not shares of the domains: {shares}")
        self._to_come = [change for change in self._to_come if change[0] < record["step"]]
        self._to_come.append((record["step"], shares))

    def on_issued(self, record: Record) -> None:
        if "domain" in record:
            self._domain_of[record["group_id"]] = record["domain"]

    def on_dropped(self, record: Record) -> None:
        self._domain_of.pop(record["group_id"], None)

    def on_consumed(self, record: Record) -> None:
        if not self._shares:
            return
        while self._to_come and self._to_come[0][0] <= record["step"]:
            self._shares, self._changed = self._to_come.pop(0)[1], True
        self._num_missing += self._batch - len(record["group_ids"])
        for name, share in self._shares.items():
            self._lags[name] += share * self._batch
        for number in record["group_ids"]:
            self._lags[self._domain_of.pop(number, "")] -= 1
        for name, lag in self._lags.items():
            if self._changed and lag > 0:
                fits = lag <= most_behind(len(self._lags)) + self._num_missing
            else:
                fits = abs(lag) < 1 + self._num_missing
            if not fits:
                raise CountsError(
                    f"after step {record['step']} the domain '{name}' is {float(lag):.2f} groups behind its share of "
                    f"{float(self._shares[name]):.3f}"
                )

    def on_inherited(self, record: Record) -> None:
        self._domain_of = {group["group_id"]: group["domain"] for group in record.get("live", ()) if "domain" in group}
