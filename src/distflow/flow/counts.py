"""What has become of the tickets of a run, in all and by domain."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from distflow.flow.account import Account, DomainAccount
from distflow.flow.snapshot import SavedDomain, Snapshot
from distflow.flow.ticket import Ticket, domain_of


class Counts:
    """The coordinator's own bookkeeping, which that of the journal (`Tally`) must equal. Fields are as in `Account`."""

    def __init__(self, start: Snapshot) -> None:
        self.issued, self.consumed = start["issued"], start["consumed"]
        self.dropped = Counter(start["dropped"])
        self.aborted, self.aborted_tokens = start.get("aborted", 0), start.get("aborted_tokens", 0)
        self.domains = {
            name: DomainAccount(each["issued"], each["consumed"], each["dropped"], each.get("aborted", 0))
            for name, each in start.get("domains", {}).items()
            if each["issued"]
        }

    def issue(self, ticket: Ticket) -> None:
        """One that was not issued before."""
        self.issued += 1
        if name := domain_of(ticket.stream):
            self.domains[name] = replace(self.of(name), issued=self.of(name).issued + 1)

    def consume(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self.consumed += 1
            if name := domain_of(ticket.stream):
                self.domains[name] = replace(self.of(name), consumed=self.of(name).consumed + 1)

    def drop(self, ticket: Ticket, reason: str) -> None:
        self.dropped[reason] += 1
        if name := domain_of(ticket.stream):
            before = self.of(name).dropped
            self.domains[name] = replace(self.of(name), dropped={**before, reason: before.get(reason, 0) + 1})

    def abort(self, tickets: Iterable[Ticket], num_tokens: int) -> None:
        """num_tokens: of all of them."""
        self.aborted_tokens += num_tokens
        for ticket in tickets:
            self.aborted += 1
            if name := domain_of(ticket.stream):
                self.domains[name] = replace(self.of(name), aborted=self.of(name).aborted + 1)

    def of(self, domain: str) -> DomainAccount:
        return self.domains.get(domain, DomainAccount())

    def account(self, running: int, complete: int) -> Account:
        return Account(
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
            account = self.of(name)
            counts = {"issued": account.issued, "consumed": account.consumed, "dropped": dict(account.dropped)}
            aborted = {"aborted": account.aborted} if account.aborted else {}
            saved[name] = cast(SavedDomain, {**counts, **aborted, "lag": lag})
        return saved
