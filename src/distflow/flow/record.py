"""A line of the journal."""

from typing import TypedDict


class InheritedGroup(TypedDict):
    """A group that was on the edge of another run."""

    ticket: int
    attempt: int
    complete: bool
    version: int


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
    to: int
