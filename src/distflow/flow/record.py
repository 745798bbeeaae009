"""A line of the journal."""

from typing import NotRequired, TypedDict


class InheritedGroup(TypedDict):
    """A group that was on the edge of another run. domain: missing in a run without any."""

    ticket: int
    attempt: int
    complete: bool
    version: int
    domain: NotRequired[str]


class InheritedDomain(TypedDict):
    """What became of a domain's tickets in another run."""

    issued: int
    consumed: int
    dropped: dict[str, int]


class Quota(TypedDict):
    """A domain's share of all places, and by how many it is behind it at the next step: fractions as texts."""

    share: str
    lag: str


class Record(TypedDict, total=False):
    """The fields of all kinds that count tickets; `Ledger` lists which kind has which. Other kinds have others."""

    t: float
    inc: int
    kind: str
    ledger: str
    ticket: int
    epoch: int
    row: int
    version: int
    attempt: int
    tokens: int
    reason: str
    step: int
    tickets: list[int]
    max_staleness: int
    consumer_batch: int
    weights: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    live: list[InheritedGroup]
    worker: str
    domain: str
    domains: dict[str, InheritedDomain]
    quotas: dict[str, Quota]
    to: int
