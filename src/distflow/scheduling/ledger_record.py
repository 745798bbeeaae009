"""The records of the ledger as types."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

from distflow.scheduling.groups import DomainCounts
from distflow.scheduling.snapshot import Snapshot, restored


class InheritedGroup(TypedDict):
    """A group from the queue of another run. domain: missing in a run without domains."""

    group_id: int
    attempt: int
    complete: bool
    version: int
    domain: NotRequired[str]


class Quota(TypedDict):
    """A domain's share of all slots, and its lag in slots at the next step: fractions as str."""

    share: str
    lag: str


class Record(TypedDict, total=False):
    """Fields of all kinds of records that count groups; `ledger.py` lists which kind has which."""

    t: float
    restart: int
    kind: str
    ledger: str
    group_id: int
    epoch: int
    row: int
    version: int
    attempt: int
    tokens: int
    reason: str
    step: int
    group_ids: list[int]
    max_staleness: int
    consumer_batch: int
    weights: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    aborted: int
    aborted_tokens: int
    live: list[InheritedGroup]
    worker: str
    domain: str
    domains: dict[str, dict[str, Any]]
    quotas: dict[str, Quota]
    shares: dict[str, str]
    to: int


def inherited_fields(start: Snapshot, domains: Mapping[str, DomainCounts]) -> dict[str, Any]:
    """Fields of a record that a run continues from another run's snapshot, without its ledger."""
    live = [
        {
            "group_id": group.group_id,
            "attempt": group.prompt_group.attempt,
            "complete": group.complete,
            "version": group.prompt_group.version if group.version is None else group.version,
            **({"domain": group.domain} if group.domain else {}),
        }
        for group in map(restored, start["live"])
    ]
    counts: dict[str, Any] = {key: start[key] for key in ("step", "issued", "consumed", "dropped")}
    aborted: dict[str, Any] = {key: start[key] for key in ("aborted", "aborted_tokens") if key in start}
    listed = {"live": live, "domains": {name: asdict(group_counts) for name, group_counts in domains.items()}}
    return {**counts, **aborted, **{key: value for key, value in listed.items() if value}}
