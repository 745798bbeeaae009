"""The lineage of a step, from only the ledger: its groups, their attempts, and the groups dropped meanwhile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.errors import UserError
from distflow.scheduling.group_states import GroupState
from distflow.scheduling.ledger import STALE, LedgerError, Record, timeline
from distflow.untrusted_files import check_file

_MAX_BYTES = 2**30
_MAX_RECORDS = 500_000
_MAX_NUMBER = 1e11


@dataclass(frozen=True)
class Attempt:
    """A start of a group. version: of the engine's weights then. worker: None if there is only one. t: seconds since
    1970. restart: of the run. aborted: because its step was full."""

    version: int
    worker: str | None
    t: float
    restart: int
    aborted: bool = False


@dataclass(frozen=True)
class GroupLineage:
    """A prompt group.

    state: at the ledger's end, or trained, or dropped for `reason`. epoch, row: None if it began in another run's
    folder. version: the lowest of its tokens, None until it is queued. tokens: of all its samples. domain: None in a
    run without domains. completed: seconds since 1970; None before.
    """

    group_id: int
    state: GroupState
    epoch: int | None
    row: int | None
    attempts: tuple[Attempt, ...]
    version: int | None
    tokens: int | None
    reason: str | None
    domain: str | None = None
    completed: float | None = None


_STATE_AFTER = {
    "issued": GroupState.GENERATING,
    "complete": GroupState.QUEUED,
    "lost": GroupState.WAITING,
    "aborted": GroupState.WAITING,
    "consumed": GroupState.TRAINED,
    "dropped": GroupState.DROPPED,
}
"""The group's state after each kind of record."""


@dataclass(frozen=True)
class StepLineage:
    """A step, counted from 1, as files and metrics count.

    groups: those that it trained on; before it is consumed, those in the sample queue. dropped: since the previous step
    was consumed. consumed_at: seconds since 1970; None if not consumed. weights: the engines' version after it; None if
    the ledger ends earlier. max_staleness: None if not in the ledger. aborted: ids of groups that ran for it and were
    not needed; aborted_tokens: generated for them.
    """

    step: int
    restart: int
    groups: tuple[GroupLineage, ...]
    dropped: tuple[GroupLineage, ...]
    consumed_at: float | None
    weights: int | None
    max_staleness: int | None
    aborted: tuple[int, ...] = ()
    aborted_tokens: int = 0


def step_lineage(path: Path, step: int) -> StepLineage:
    """The lineage of a step. Reads the surviving timeline once, up to the step, keeping only the groups in the queue.

    Raises UserError if there is no ledger or no such step in it, LedgerError if it is damaged.
    """
    if not path.exists():
        raise UserError(
            f"there is no {path}: the run in {path.parent} does not train prompt groups, or has not started"
        )
    reader = _Reader(step)
    try:
        check_file(path, path.parent, _MAX_BYTES)
        found = reader.read(record for _, record in timeline(path))
    except OSError as err:
        raise LedgerError(f"'{path}' cannot be read: {err.strerror}") from err
    except (KeyError, TypeError, AttributeError) as err:
        raise LedgerError(f"{path} is damaged: it has an impossible record ({err!r})") from err
    if found is None:
        raise UserError(f"{path} has no step {step}: {reader.steps()}")
    return found


class _Reader:
    """Follows the groups in the queue until the step is consumed."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._next_step = self._first_step = 1
        self._restart = 0
        self._max_staleness: int | None = None
        self._live: dict[int, list[Record]] = {}
        self._inherited: dict[int, Record] = {}
        self._dropped: list[list[Record]] = []
        self._aborted: list[Record] = []
        self._num_kept = 0

    def read(self, records: Iterable[Record]) -> StepLineage | None:
        """The step's lineage; None if the records have no such step."""
        remaining = iter(records)
        for record in remaining:
            kind = record["kind"]
            if kind in _STATE_AFTER or kind == "assigned":
                for group_id in record["group_ids"] if "group_ids" in record else [record["group_id"]]:
                    self._live.setdefault(group_id, []).append(record)
                    self._num_kept += 1
                if self._num_kept > _MAX_RECORDS:
                    raise TypeError(f"more than {_MAX_RECORDS:,} records of groups that no step took")
            if kind == "aborted":
                self._aborted.append(record)
            elif kind == "dropped":
                self._dropped.append(self._live.pop(record["group_id"]))
            elif kind == "consumed":
                if record["step"] == self._step:
                    after, self._restart = next(remaining, None), record["restart"]
                    weights = after["weights"] if after and after["kind"] == "version" else None
                    return self._lineage(record["group_ids"], _number(record["t"]), weights)
                for group_id in record["group_ids"]:
                    self._num_kept -= len(self._live.pop(group_id))
                self._num_kept -= sum(map(len, self._dropped))
                self._dropped.clear()
                self._aborted.clear()
                self._next_step = record["step"] + 1
            elif kind == "plan":
                self._max_staleness = record["max_staleness"]
            elif kind == "inherited":
                self._next_step = self._first_step = record["step"] + 1
                self._inherited = {group["group_id"]: group for group in record.get("live", ())}
                self._live = {group_id: [] for group_id in self._inherited}
            self._restart = record["restart"]
        if self._step == self._next_step and (self._live or self._dropped):
            return self._lineage(self._live, consumed_at=None, weights=None)
        return None

    def steps(self) -> str:
        """The steps that the ledger has, in words."""
        first, last = self._first_step, self._next_step - 1
        if self._step < first and first > 1:
            return f"those before {first} are in the folder of the run that it resumes from"
        return f"it has steps {first} to {last}, counted from 1" if last >= first else "none was consumed yet"

    def _lineage(self, group_ids: Iterable[int], consumed_at: float | None, weights: int | None) -> StepLineage:
        return StepLineage(
            self._step,
            self._restart,
            groups=tuple(self._group(group_id, self._live[group_id]) for group_id in sorted(group_ids)),
            dropped=tuple(self._group(records[-1]["group_id"], records) for records in self._dropped),
            consumed_at=consumed_at,
            weights=weights,
            max_staleness=self._max_staleness,
            aborted=tuple(group_id for record in self._aborted for group_id in record["group_ids"]),
            aborted_tokens=sum(_whole(record["tokens"]) for record in self._aborted),
        )

    def _group(self, group_id: int, records: Sequence[Record]) -> GroupLineage:
        last = {record["kind"]: record for record in records}
        issued, dropped = last.get("issued"), last.get("dropped")
        attempts = _attempts(records)
        inherited = self._inherited.get(group_id)
        state = GroupState.QUEUED if inherited and inherited["complete"] else GroupState.WAITING
        for kind in (record["kind"] for record in records):
            state = _STATE_AFTER.get(kind, state)
        if state is GroupState.GENERATING and issued and issued["restart"] != self._restart:
            state = GroupState.WAITING  # the process that held it is gone
        is_complete = state in (GroupState.QUEUED, GroupState.TRAINED) or bool(dropped and dropped["reason"] == STALE)
        complete = last.get("complete") if is_complete else None
        version = inherited.get("version") if inherited and is_complete else None
        if complete:  # older ledgers lack the version of complete groups: use the group's
            version = complete.get("version", attempts[-1].version if attempts else None)
        return GroupLineage(
            group_id,
            state,
            epoch=_whole(issued["epoch"]) if issued else None,
            row=_whole(issued["row"]) if issued else None,
            attempts=attempts,
            version=None if version is None else _whole(version),
            tokens=_whole(complete["tokens"]) if complete else None,
            reason=str(dropped["reason"]) if dropped else None,
            domain=str(known["domain"]) if (known := issued or inherited or {}) and "domain" in known else None,
            completed=_number(complete["t"]) if complete else None,
        )


def _attempts(records: Sequence[Record]) -> tuple[Attempt, ...]:
    attempts: list[Attempt] = []
    for record in records:
        if record["kind"] == "issued":
            attempts.append(Attempt(_whole(record["version"]), None, _number(record["t"]), record["restart"]))
        elif record["kind"] == "assigned" and attempts:
            attempts[-1] = replace(attempts[-1], worker=str(record["worker"]))
        elif record["kind"] == "aborted" and attempts:
            attempts[-1] = replace(attempts[-1], aborted=True)
    return tuple(attempts)


def _whole(value: object) -> int:
    if not isinstance(value, int) or abs(value) > _MAX_NUMBER:
        raise TypeError(f"{value!r:.40} is not a valid integer in a ledger")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise TypeError(f"{value!r:.40} is not a valid number in a ledger")
    return value
