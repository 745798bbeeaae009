"""The scheduler's state as JSON, to resume from, as of the last release."""

from operator import attrgetter
from typing import Any, NotRequired, TypedDict

from distflow.errors import UserError
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.group_states import DomainCounts, GroupCounts, GroupState, PromptGroup

_IDENTITY = ("group_id", "epoch", "row", "group_size", "version", "attempt", "stream", "position")
_identity = attrgetter(*_IDENTITY)


class SavedGroup(TypedDict):
    """A group in the queue at the snapshot: complete ones keep their batch, the others start
    again."""

    prompt_group: dict[str, Any]
    """The fields that identify a `PromptGroup`."""
    complete: bool
    num_tokens: int
    """0 until complete."""
    failures: int
    """How often it was lost and retried."""
    version: int | None
    """The lowest of its tokens; None until complete."""
    aborts: NotRequired[int]
    """How often it was aborted; missing for 0."""


class SavedPlan(TypedDict):
    """The part of a `DataPlan` that a resumed run may not change. domains: their rows, in order;
    may be missing."""

    num_rows: int
    seed: int
    shuffle: bool
    domains: NotRequired[dict[str, int]]
    sampler: NotRequired[str]


class Snapshot(TypedDict):
    """The state at the last release."""

    plan: SavedPlan
    restart: int
    step: int
    issued: int
    """As `consumed`, `dropped` and `aborted` in `GroupCounts`."""
    offered: NotRequired[int]
    """Groups issued for rows that are not in the data set."""
    consumed: int
    dropped: dict[str, int]
    aborted: NotRequired[int]
    live: list[SavedGroup]
    """Groups in the queue, by group id."""
    ledger: dict[str, Any] | None
    """The fields of its `Mark`; None without one."""
    domains: NotRequired[dict[str, dict[str, Any]]]
    """`saved_counts` of each by name, and its lag: the slots by which it is behind its share at the
    next step, as a fraction. Missing without domains."""
    sampler: NotRequired[dict[str, Any]]
    """What `RowSampler.saved` returns; missing without one."""
    secs: NotRequired[dict[str, float]]
    """Since the last save and validation; missing if these do not go by time."""
    ended: NotRequired[dict[str, str]]
    """Which condition ended the run, and why; missing if none has."""


def at_start(plan: DataPlan) -> Snapshot:
    """The snapshot of a run that has done nothing yet."""
    return {
        "plan": saved_plan(plan),
        "restart": -1,
        "step": 0,
        "issued": 0,
        "consumed": 0,
        "dropped": {},
        "live": [],
        "ledger": None,
    }


def saved_plan(plan: DataPlan) -> SavedPlan:
    saved: SavedPlan = {"num_rows": plan.num_rows, "seed": plan.seed, "shuffle": plan.shuffle}
    if plan.domains:
        saved["domains"] = {domain.name: domain.num_rows for domain in plan.domains}
    if plan.sampler is not None:
        saved["sampler"] = plan.sampler
    return saved


def saved_counts(counts: DomainCounts | GroupCounts) -> dict[str, Any]:
    """A snapshot's counts of a run or a domain."""
    saved = {"issued": counts.issued, "consumed": counts.consumed, "dropped": dict(counts.dropped)}
    if counts.aborted:
        return {**saved, "aborted": counts.aborted}
    return saved


def saved_group(group: PromptGroup) -> SavedGroup:
    """A group in the queue as JSON."""
    live: SavedGroup = {
        "prompt_group": dict(zip(_IDENTITY, _identity(group), strict=True)),
        "complete": group.complete,
        "num_tokens": group.num_tokens,
        "failures": group.failures,
        "version": group.lowest_version,
    }
    if group.num_aborts:
        return {**live, "aborts": group.num_aborts}

    return live


def restored(group: SavedGroup) -> PromptGroup:
    """The inverse of `saved_group`."""
    return PromptGroup(
        **group["prompt_group"],
        state=GroupState.QUEUED if group["complete"] else GroupState.WAITING,
        num_tokens=group["num_tokens"],
        failures=group["failures"],
        lowest_version=group["version"],
        num_aborts=group.get("aborts", 0),
    )


def check_resumable(plan: DataPlan, snapshot: Snapshot) -> None:
    """Raises UserError if a run with this plan cannot resume from the snapshot."""
    before = snapshot["plan"]
    now = saved_plan(plan)
    for key, then, wanted, option in (
        ("domains", _shown(before), _shown(now), "data.domains"),
        ("num_rows", before["num_rows"], now["num_rows"], "data.train_files"),
        ("seed", before["seed"], now["seed"], "data.seed"),
        ("sampler", before.get("sampler"), now.get("sampler"), "data.sampler"),
        ("shuffle", before["shuffle"], now["shuffle"], "data.shuffle"),
    ):
        if then != wanted:
            raise UserError(
                f"the checkpoint was made with {key}={then}, this run has {wanted}: rows would be "
                f"trained twice or skipped. Restore {option}, or start again with "
                "trainer.resume_mode=never and another trainer.default_local_dir"
            )


def _shown(plan: SavedPlan) -> str:
    """The domains with their rows, in order."""
    return (
        ", ".join(f"{name} ({rows} rows)" for name, rows in plan.get("domains", {}).items())
        or "none"
    )


def inherited_fields(start: Snapshot) -> dict[str, Any]:
    """Fields of the record `inherited`: a run continues from another run's snapshot, without its
    ledger."""
    names = ("step", "issued", "consumed", "dropped", "aborted", "domains")
    fields: dict[str, Any] = {name: value for name, value in start.items() if name in names}

    live = []
    for group in map(restored, start["live"]):
        if group.lowest_version is None:
            version = group.version
        else:
            version = group.lowest_version

        own = {
            "group_id": group.group_id,
            "attempt": group.attempt,
            "complete": group.complete,
            "version": version,
        }
        live.append({**own, "domain": group.domain} if group.domain else own)

    return {**fields, "live": live}
