"""The lineage of a step, from only the ledger: its groups, their attempts, and the groups dropped
meanwhile."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distflow.errors import UserError
from distflow.observe.ledger_groups import Group, fold_groups, groups_of
from distflow.scheduling.ledger import LedgerError, Record, surviving_records
from distflow.untrusted_files import check_file

_MAX_BYTES = 2**30
_MAX_GROUPS = 500_000
_LATEST_TIME = 1e11


@dataclass(frozen=True)
class StepLineage:
    """A step, counted from 1, as files and metrics count.

    groups: those that it trained on; before it is consumed, those in the sample queue. dropped:
    since the previous step was consumed. consumed_at: seconds since 1970; None if not consumed.
    weights: the engines' version after it; None if the ledger ends earlier. max_staleness: None if
    not in the ledger. aborted: ids of groups that ran for it and were not needed; aborted_tokens:
    generated for them.
    """

    step: int
    restart: int
    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]
    consumed_at: float | None
    weights: int | None
    max_staleness: int | None
    aborted: tuple[int, ...] = ()
    aborted_tokens: int = 0


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
    groups, dropped, aborted = dict[int, Group](), list[Group](), list[Record]()
    first = 1
    following = 1
    restart = 0
    bound = None

    def lineage(
        own: Iterable[Group], consumed_at: float | None = None, weights: int | None = None
    ) -> StepLineage:
        ids = tuple(group_id for record in aborted for group_id in record["group_ids"])
        tokens = sum(record["tokens"] for record in aborted)
        ordered = tuple(sorted(own, key=lambda group: group.group_id))
        return StepLineage(
            step, restart, ordered, tuple(dropped), consumed_at, weights, bound, ids, tokens
        )

    for record in records:
        kind = record["kind"]
        restart = record["restart"]
        fold_groups(groups, record)
        if len(groups) + len(dropped) > _MAX_GROUPS:
            raise TypeError(f"more than {_MAX_GROUPS:,} groups that no step took")
        if kind == "aborted":
            aborted.append(record)
        elif kind == "dropped":
            dropped.append(groups.pop(record["group_id"]))
        elif kind == "consumed":
            own = [groups.pop(group_id) for group_id in record["group_ids"]]
            if record["step"] == step:
                if not abs(record["t"]) <= _LATEST_TIME:
                    raise TypeError(record["t"])
                after: Record = next(records, {"kind": ""})
                return lineage(
                    own, record["t"], after["weights"] if after["kind"] == "version" else None
                )
            dropped = []
            aborted = []
            following = record["step"] + 1
        elif kind == "plan":
            bound = record["max_staleness"]
        elif kind == "inherited":
            first = following = record["step"] + 1
    if step == following and (groups or dropped):
        for group in groups.values():
            if group.state == "generating" and group.attempts[-1].restart != restart:
                group.state = "waiting"  # the process that held it is gone
        return lineage(groups.values())
    if step < first and first > 1:
        return f"those before {first} are in the folder of the run that it resumes from"
    return (
        f"it has steps {first} to {following - 1}, counted from 1"
        if following > first
        else "none was consumed yet"
    )
