"""The lineage of a step, from only the ledger: its groups, their attempts, and the groups dropped
meanwhile."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from distflow.errors import UserError
from distflow.observe.crash_safe_files import time_of
from distflow.observe.ledger_groups import Group, fold_groups, groups_of
from distflow.scheduling.ledger import LedgerError, Record, surviving_records
from distflow.untrusted_files import check_file

_MAX_BYTES = 2**30
_MAX_GROUPS = 500_000
"""Those that no step took, which are kept in memory."""


@dataclass(frozen=True)
class StepLineage:
    """A step, counted from 1, as files and metrics count."""

    step: int
    restart: int
    groups: tuple[Group, ...]
    """Those that it trained on; before it is consumed, those in the sample queue."""
    dropped: tuple[Group, ...]
    """Since the previous step was consumed."""
    max_staleness: int | None
    """None if the ledger does not say it."""
    consumed_at: float | None = None
    """Seconds since 1970; None if it is not consumed."""
    weights: int | None = None
    """The engines' version after it; None if the ledger ends earlier."""
    aborted: tuple[int, ...] = ()
    """Ids of groups that ran for it and were not needed."""


def ledger_groups(path: Path) -> dict[int, Group]:
    """The groups of a ledger by their ids; empty if it is missing."""
    return groups_of(surviving_records(path))


def step_lineage(path: Path, step: int) -> StepLineage:
    """The lineage of a step. Reads the surviving timeline once, up to the step, keeping only the
    groups in the queue.

    Raises UserError if there is no ledger or no such step in it, LedgerError if it is damaged.
    """
    if not path.exists():
        raise UserError(
            f"there is no {path}: the run in {path.parent} does not train prompt groups, or has "
            "not started"
        )

    try:
        check_file(path, path.parent, _MAX_BYTES)
        found = _find(step, surviving_records(path))
    except OSError as err:
        raise LedgerError(f"'{path}' cannot be read: {err.strerror}") from err
    except (KeyError, TypeError, AttributeError) as err:
        raise LedgerError(f"{path} is damaged: it has an impossible record ({err!r})") from err

    if isinstance(found, str):
        raise UserError(f"{path} has no step {step}: {found}")
    return found


def _find(step: int, records: Iterator[Record]) -> StepLineage | str:
    """The lineage, or a sentence on the steps that there are."""
    waiting = _Waiting()
    first = 1
    following = 1
    for record in records:
        waiting.add(record)
        if len(waiting.groups) + len(waiting.dropped) > _MAX_GROUPS:
            raise TypeError(f"more than {_MAX_GROUPS:,} groups that no step took")

        if record["kind"] == "inherited":
            first = record["step"] + 1
            following = first

        if record["kind"] == "consumed":
            own = waiting.take(record["group_ids"])
            if record["step"] == step:
                after: Record = next(records, {"kind": ""})
                weights = None
                if after["kind"] == "version":
                    weights = after["weights"]

                return replace(
                    waiting.lineage(step, own), consumed_at=time_of(record), weights=weights
                )

            waiting.begin_step()
            following = record["step"] + 1

    if step == following and (waiting.groups or waiting.dropped):
        return waiting.lineage(step, waiting.groups_under_way())
    if step < first and first > 1:
        return f"those before {first} are in the folder of the run that it resumes from"
    if following == first:
        return "none was consumed yet"

    return f"it has steps {first} to {following - 1}, counted from 1"


@dataclass
class _Waiting:
    """What a ledger tells between two steps."""

    groups: dict[int, Group] = field(default_factory=dict)
    """Those that no step took, by id."""
    dropped: list[Group] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    restart: int = 0
    max_staleness: int | None = None

    def add(self, record: Record) -> None:
        """Apply the next record."""
        fold_groups(self.groups, record)
        self.restart = record["restart"]

        match record["kind"]:
            case "plan":
                self.max_staleness = record["max_staleness"]
            case "aborted":
                self.aborted += record["group_ids"]
            case "dropped":
                self.dropped.append(self.groups.pop(record["group_id"]))

    def take(self, group_ids: Iterable[int]) -> list[Group]:
        return [self.groups.pop(group_id) for group_id in group_ids]

    def begin_step(self) -> None:
        self.dropped = []
        self.aborted = []

    def groups_under_way(self) -> Iterable[Group]:
        for group in self.groups.values():
            if group.state == "generating" and group.restart != self.restart:
                group.state = "waiting"  # the process that held it is gone
        return self.groups.values()

    def lineage(self, step: int, groups: Iterable[Group]) -> StepLineage:
        """Of a step that is not consumed."""
        return StepLineage(
            step,
            self.restart,
            tuple(sorted(groups, key=lambda group: group.group_id)),
            tuple(self.dropped),
            self.max_staleness,
            aborted=tuple(self.aborted),
        )
