"""The account of tickets: every one that was issued runs, waits, was consumed or was dropped for a reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field


class AccountingError(RuntimeError):
    """A ticket was lost, doubled, or moved in a way that no run makes. A fault of ours; the message names it."""


@dataclass(frozen=True)
class DomainAccount:
    """Of one domain: tickets that were issued, consumed, and dropped by reason. aborted: times, as in `Account`."""

    issued: int = 0
    consumed: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    aborted: int = 0


@dataclass(frozen=True)
class Account:
    """How many tickets are where. dropped: counts by reason. aborted: times that a group was ended because its step had
    all that it needs, so that it waits to be issued again; aborted_tokens: what had been drawn for those. domains: of
    each that a ticket was issued for, empty of a run without them."""

    issued: int = 0
    running: int = 0
    complete: int = 0
    consumed: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    aborted: int = 0
    aborted_tokens: int = 0
    domains: Mapping[str, DomainAccount] = field(default_factory=dict)

    def check(self) -> None:
        """Raises AccountingError where a ticket is nowhere or in two places."""
        known = self.running + self.complete + self.consumed + sum(self.dropped.values())
        if self.issued != known:
            raise AccountingError(f"{self.issued} tickets were issued, but {known} are accounted for: {self}")
