"""The prompt groups of a run, as its ledger tells of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.observe.crash_safe_files import time_of, whole

_STATE_AFTER = {
    "issued": "generating",
    "assigned": "",
    "complete": "queued",
    "lost": "waiting",
    "aborted": "waiting",
    "consumed": "trained",
    "dropped": "dropped",
}
"""The state of a group after each kind of record; empty if it stays."""

GROUP_COLUMNS = (
    "group_id",
    "state",
    "step",
    "epoch",
    "row",
    "domain",
    "version",
    "tokens",
    "attempts",
    "worker",
    "started",
    "completed",
    "ended",
    "reason",
)


@dataclass(slots=True)
class Group:
    """A prompt group. What is None is not in the ledger. Times are seconds since the epoch."""

    group_id: int

    state: str = ""
    """The last one."""

    step: int | None = None
    """The step that trained on it."""

    epoch: int | None = None
    row: int | None = None
    domain: str | None = None

    version: int | None = None
    """The lowest weight version of its tokens."""

    tokens: int | None = None

    attempts: int = 0
    """How often it was started. Of the last start:"""

    worker: str | None = None
    started: float | None = None
    engine_version: int | None = None
    restart: int | None = None

    completed: float | None = None

    ended: float | None = None
    """When a step took it, or it was dropped."""

    reason: str | None = None
    """Why it was dropped."""

    def values(self) -> tuple[object, ...]:
        """Those of `GROUP_COLUMNS`."""
        return tuple(getattr(self, name) for name in GROUP_COLUMNS)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Change as a record of the group says."""
        match record["kind"]:
            case "issued":
                self.epoch = whole(record.get("epoch"))
                self.row = whole(record.get("row"))

                if record.get("domain") is None:
                    self.domain = None
                else:
                    self.domain = str(record["domain"])

                self.attempts += 1
                self.worker = None
                self.started = time_of(record)
                self.engine_version = whole(record.get("version"))
                self.restart = whole(record.get("restart"))
            case "assigned":
                self.worker = str(record.get("worker"))
            case "complete":
                self.tokens = whole(record.get("tokens"))
                self.version = whole(record.get("version"))
                self.completed = time_of(record)
            case "lost" | "aborted":
                self.tokens = None
                self.version = None
                self.completed = None
            case "consumed":
                self.step = whole(record.get("step"))
                self.ended = time_of(record)
            case "dropped":
                self.reason = str(record.get("reason"))
                self.ended = time_of(record)

        self.state = _STATE_AFTER[record["kind"]] or self.state


def by_group(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A record of a ledger as one of each of its groups, if it is of several: a list has a value
    for each of them."""
    numbers = record.get("group_id")
    if not isinstance(numbers, list):
        return [record]

    lists = {}
    for name, value in record.items():
        if isinstance(value, list) and len(value) == len(numbers):
            lists[name] = value

    found = list[Mapping[str, Any]]()
    for values in zip(*lists.values(), strict=True):
        found.append({**record, **dict(zip(lists, values, strict=True))})
    return found


def groups_of(records: Iterable[Mapping[str, Any]]) -> dict[int, Group]:
    groups = dict[int, Group]()
    for record in records:
        fold_groups(groups, record)
    return groups


def fold_groups(groups: dict[int, Group], record: Mapping[str, Any]) -> None:
    """Apply the next record of a ledger. One that is none changes nothing."""
    kind = record.get("kind")
    if kind == "inherited":  # from the run that this one resumes
        _inherit(groups, record.get("live"))
        return
    if not isinstance(kind, str) or kind not in _STATE_AFTER:
        return

    if "group_ids" in record:
        listed = record["group_ids"]
        numbers = listed if isinstance(listed, list | tuple) else ()
        found = [(number, record) for number in numbers]
    else:
        found = [(entry.get("group_id"), entry) for entry in by_group(record)]

    for group_id, facts in found:
        number = whole(group_id)
        if number is None:
            continue
        if number not in groups:
            groups[number] = Group(number)
        groups[number].apply(facts)


def _inherit(groups: dict[int, Group], live: object) -> None:
    if not isinstance(live, list):
        return

    for entry in live:
        if not isinstance(entry, dict):
            continue

        number = whole(entry.get("group_id"))
        if number is None:
            continue

        domain = entry.get("domain")
        group = Group(number, "waiting", domain=domain and str(domain))
        if entry.get("complete"):
            group.state = "queued"
            group.version = whole(entry.get("version"))

        groups[number] = group
