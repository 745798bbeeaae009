"""Audits the shares of domains from journal records alone."""

from collections.abc import Callable
from fractions import Fraction

from distflow.flow.account import AccountingError
from distflow.flow.quotas import most_behind
from distflow.flow.record import Record

_Shares = dict[str, Fraction]


class QuotaAudit:
    """Applies the records of one surviving timeline in order. That tickets move as they may is `Tally`'s to say.

    After each step a domain has had its share of all places to within less than one, and the groups by which steps
    were short; where shares have changed, the sum of its shares over all places, behind it by `most_behind` at most. A
    plan says where it goes on from; in one folder that is where the one before it stood.
    """

    def __init__(self) -> None:
        self._batch = 0
        self._shares: _Shares = {}
        self._to_come: list[tuple[int, _Shares]] = []  # from which step on
        self._lags: dict[str, Fraction] = {}
        self._changed = False
        self._num_missing = 0
        self._domain_of: dict[int, str] = {}  # of tickets on the edge
        self._apply: dict[str, Callable[[Record], None]] = {
            "plan": self._plan,
            "shares": self._change,
            "issued": self._issued,
            "dropped": self._dropped,
            "consumed": self._consumed,
            "inherited": self._inherited,
        }

    def apply(self, record: Record) -> None:
        """Raises AccountingError naming the step and the domain."""
        apply = self._apply.get(record["kind"])
        if apply is not None:
            apply(record)

    def _plan(self, record: Record) -> None:
        quotas = record.get("quotas", {})
        lags = {name: Fraction(quota["lag"]) for name, quota in quotas.items()}
        if self._lags and not self._num_missing and lags != self._lags:
            raise AccountingError(f"the domains were behind their shares by {self._lags}, and went on from {lags}")
        shares = {name: Fraction(quota["share"]) for name, quota in quotas.items()}
        self._changed |= bool(self._shares) and shares != self._shares
        self._changed |= any(abs(lag) >= 1 for lag in lags.values())
        self._batch, self._lags, self._num_missing = record["consumer_batch"], lags, 0
        self._shares, self._to_come = shares, []

    def _change(self, record: Record) -> None:
        shares = {name: Fraction(share) for name, share in record["shares"].items()}
        if shares.keys() != self._shares.keys() or sum(shares.values()) != 1 or min(shares.values()) < 0:
            raise AccountingError(f"the shares from step {record['step']} on are no shares of the domains: {shares}")
        self._to_come = [change for change in self._to_come if change[0] < record["step"]]
        self._to_come.append((record["step"], shares))

    def _issued(self, record: Record) -> None:
        if "domain" in record:
            self._domain_of[record["ticket"]] = record["domain"]

    def _dropped(self, record: Record) -> None:
        self._forget(record["ticket"])

    def _consumed(self, record: Record) -> None:
        if not self._shares:
            return
        while self._to_come and self._to_come[0][0] <= record["step"]:
            self._shares, self._changed = self._to_come.pop(0)[1], True
        self._num_missing += self._batch - len(record["tickets"])
        for name, share in self._shares.items():
            self._lags[name] += share * self._batch
        for number in record["tickets"]:
            self._lags[self._forget(number)] -= 1
        for name, lag in self._lags.items():
            if not self._may_be(lag):
                raise AccountingError(
                    f"after step {record['step']} the domain '{name}' is {float(lag):.2f} groups behind its share of "
                    f"{float(self._shares[name]):.3f}"
                )

    def _may_be(self, lag: Fraction) -> bool:
        if self._changed and lag > 0:
            return lag <= most_behind(len(self._lags)) + self._num_missing
        return abs(lag) < 1 + self._num_missing

    def _inherited(self, record: Record) -> None:
        self._domain_of = {group["ticket"]: group["domain"] for group in record.get("live", ()) if "domain" in group}

    def _forget(self, number: int) -> str:
        return self._domain_of.pop(number, "")
