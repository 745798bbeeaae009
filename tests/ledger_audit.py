"""Reads a run's ledger again: every move of a group, the bound on staleness, the order of versions,
domains' shares."""

from fractions import Fraction
from pathlib import Path

from distflow.scheduling.group_states import CountsError, GroupCounts
from distflow.scheduling.ledger import Record, timeline
from tests.ledger_counts import LedgerCounts


def verify(path: Path) -> GroupCounts:
    """Counts of the surviving timeline. Checks every move of a group, and that each row of an epoch
    was issued as one group only, each step ended in a version, no group was staler than the plan
    allowed, versions never went backwards, and each domain had its share.

    Raises CountsError, naming the group that moved in an impossible way, e.g. was consumed twice.
    """
    counts = LedgerCounts()
    staleness = StalenessAudit()
    quotas = QuotaAudit()

    owner: dict[tuple[int, int], int] = {}
    num_consumed = num_versions = 0
    for _, record in timeline(path):
        counts.apply(record)
        if record["kind"] == "issued":
            where = (record["epoch"], record["row"])
            if owner.setdefault(where, record["group_id"]) != record["group_id"]:
                raise CountsError(
                    f"row {where[1]} of epoch {where[0]} was issued twice, as groups "
                    f"{owner[where]} and "
                    f"{record['group_id']}"
                )

        staleness.apply(record)
        quotas.apply(record)
        num_consumed += record["kind"] == "consumed"
        num_versions += record["kind"] == "version"

    if num_consumed > num_versions:
        raise CountsError(
            f"{num_consumed} steps were consumed, but only {num_versions} ended in a version"
        )

    counts.group_counts.check()
    return counts.group_counts


def most_behind(num_domains: int) -> Fraction:
    """Slots that a domain may be behind if shares change: 1 + 1/2 + ... + 1/num_domains.

    After every slot the j domains most behind are so by at most j · (1 + 1/(j + 1) + ... +
    1/num_domains) in all. That stays true if none is behind by a slot before one is assigned, as
    then none is after. Else the one most behind gets it: if that is still one of the j, they gained
    a slot at most and lost one; if not, the j + 1 that it was one of had (j + 1) · (1 + 1/(j + 2) +
    ...) + 1 between them, and it no less than each other."""
    return sum((Fraction(1, number) for number in range(1, num_domains + 1)), Fraction(0))


class _Audit:
    """Applies the records of one surviving timeline in order, each by the method `on_KIND`; a
    record without one is skipped."""

    def apply(self, record: Record) -> None:
        """Raises CountsError naming the group, the step or the domain."""
        if (apply := getattr(self, f"on_{record['kind']}", None)) is not None:
            apply(record)


class StalenessAudit(_Audit):
    """Checks staleness and the order of versions; `LedgerCounts` checks the groups' moves.

    The staleness of a group is the version that its step began with, `step - 1`, less the lowest
    one of its tokens. Older ledgers have no `plan`, so that staleness has no bound, and no version
    of complete groups, which then is the group's.
    """

    def __init__(self) -> None:
        self._max_staleness: int | None = None
        self._last_step = 0
        self._versions: dict[int, int] = {}  # of groups in the queue
        self._restart = -1
        self._engine_version = self._weights = 0  # lowest that may come next in this restart

    def apply(self, record: Record) -> None:
        if record["restart"] != self._restart:
            self._restart = record["restart"]
            self._engine_version = 0
            self._weights = 0
        super().apply(record)

    def on_plan(self, record: Record) -> None:
        self._max_staleness = record["max_staleness"]

    def on_issued(self, record: Record) -> None:
        version = record["version"]
        if not self._engine_version <= version <= self._last_step:
            raise CountsError(
                f"group {record['group_id']} was issued at version {version}, but "
                f"{self._engine_version} was "
                f"there before and step {self._last_step} was the last one: versions never go "
                "backwards, nor ahead of "
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
        step = record["step"]
        bound = self._max_staleness

        for number in record["group_ids"]:
            version = self._versions.pop(number, None)
            if bound is not None and version is not None and not 0 <= step - 1 - version <= bound:
                raise CountsError(
                    f"step {step} consumed group {number}, which holds tokens of version "
                    f"{version}, but max_staleness "
                    f"was {bound}"
                )

        self._last_step = step

    def on_version(self, record: Record) -> None:
        step = record["step"]
        weights = record["weights"]
        if step != self._last_step or not self._weights <= weights <= step:
            raise CountsError(
                f"version {step} with the weights of step {weights} was recorded, but step "
                f"{self._last_step} ended and "
                f"the weights of step {self._weights} were there before: versions never go "
                "backwards"
            )

        self._weights = weights

    def on_inherited(self, record: Record) -> None:
        self._last_step = record["step"]
        self._versions = {
            group["group_id"]: group["version"]
            for group in record.get("live", ())
            if "version" in group
        }


_Shares = dict[str, Fraction]


class QuotaAudit(_Audit):
    """Checks the shares of domains; `LedgerCounts` checks the groups' moves.

    After each step a domain has had its share of all slots to within less than one, plus the groups
    by which steps were short; if shares have changed, it is at most `most_behind` behind the sum of
    its shares over all slots. A plan has the lags to continue from; within one folder these must be
    the previous ones.
    """

    def __init__(self) -> None:
        self._batch = 0
        self._shares: _Shares = {}
        self._lags: dict[str, Fraction] = {}
        self._changed = False
        self._num_missing = 0
        self._domain_of: dict[int, str] = {}  # of groups in the queue

    def on_plan(self, record: Record) -> None:
        quotas = record.get("quotas", {})
        lags = {name: Fraction(quota["lag"]) for name, quota in quotas.items()}
        if self._lags and not self._num_missing and lags != self._lags:
            raise CountsError(
                f"the domains were behind their shares by {self._lags}, but continued from {lags}"
            )

        shares = {name: Fraction(quota["share"]) for name, quota in quotas.items()}
        self._changed |= bool(self._shares) and shares != self._shares
        self._changed |= any(abs(lag) >= 1 for lag in lags.values())
        self._batch = record["consumer_batch"]
        self._lags = lags
        self._num_missing = 0
        self._shares = shares

    def on_issued(self, record: Record) -> None:
        if "domain" in record:
            self._domain_of[record["group_id"]] = record["domain"]

    def on_dropped(self, record: Record) -> None:
        self._domain_of.pop(record["group_id"], None)

    def on_consumed(self, record: Record) -> None:
        if not self._shares:
            return

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
                    f"after step {record['step']} the domain '{name}' is {float(lag):.2f} groups "
                    "behind its share of "
                    f"{float(self._shares[name]):.3f}"
                )

    def on_inherited(self, record: Record) -> None:
        self._domain_of = {
            group["group_id"]: group["domain"]
            for group in record.get("live", ())
            if "domain" in group
        }
