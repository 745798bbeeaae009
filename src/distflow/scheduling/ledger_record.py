"""A line of the journal."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

from distflow.scheduling.groups import DomainCounts, PromptGroup, domain_of
from distflow.scheduling.snapshot import Snapshot, restored


class InheritedGroup(TypedDict):
    """A group that was in the queue of another run. domain: missing in a run without any."""

    group_id: int
    attempt: int
    complete: bool
    version: int
    domain: NotRequired[str]


class InheritedDomain(TypedDict):
    """What became of a domain's groups in another run."""

    issued: int
    consumed: int
    dropped: dict[str, int]
    aborted: NotRequired[int]


class Quota(TypedDict):
    """A domain's share of all places, and by how many it is behind it at the next step: fractions as texts."""

    share: str
    lag: str


class Record(TypedDict, total=False):
    """The fields of all kinds that count groups; `Ledger` lists which kind has which. Other kinds have others."""

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
    domains: dict[str, InheritedDomain]
    quotas: dict[str, Quota]
    shares: dict[str, str]
    to: int


def issued_fields(group_id: PromptGroup) -> dict[str, Any]:
    """Of a record that the group was handed out."""
    fields = {
        "group_id": group_id.group_id,
        "epoch": group_id.epoch,
        "row": group_id.row,
        "version": group_id.version,
        "attempt": group_id.attempt,
    }
    name = domain_of(group_id.stream)
    return {**fields, "domain": name} if name else fields


def inherited_fields(start: Snapshot, domains: Mapping[str, DomainCounts]) -> dict[str, Any]:
    """Of a record that a run goes on from the snapshot of another, whose journal it does not have."""
    live = [
        {
            "group_id": group.prompt_group.group_id,
            "attempt": group.prompt_group.attempt,
            "complete": group.complete,
            "version": group.prompt_group.version if group.version is None else group.version,
            **({"domain": name} if (name := domain_of(group.prompt_group.stream)) else {}),
        }
        for group in map(restored, start["live"])
    ]
    counts: dict[str, Any] = {key: start[key] for key in ("step", "issued", "consumed", "dropped")}
    aborted: dict[str, Any] = {key: start[key] for key in ("aborted", "aborted_tokens") if key in start}
    listed = {"live": live, "domains": {name: asdict(group_counts) for name, group_counts in domains.items()}}
    return {**counts, **aborted, **{key: value for key, value in listed.items() if value}}
