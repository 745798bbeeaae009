"""What a coordinator goes on from: JSON, cut at the last release."""

from dataclasses import asdict
from typing import TypedDict, cast

from distflow.config.errors import UserError
from distflow.flow.data_plan import DataPlan
from distflow.flow.edge import Group
from distflow.flow.ticket import Ticket


class SavedTicket(TypedDict):
    """The fields of a `Ticket`."""

    number: int
    epoch: int
    row: int
    group_size: int
    version: int
    attempt: int
    stream: str


class LiveGroup(TypedDict):
    """A group that was on the edge at the cut: complete ones keep their batch, the others start again.

    num_tokens: 0 until complete. failures: times that it was lost and tried again.
    """

    ticket: SavedTicket
    complete: bool
    num_tokens: int
    failures: int


class SavedPlan(TypedDict):
    """What of a `DataPlan` a run that goes on may not change."""

    num_rows: int
    seed: int
    shuffle: bool
    max_staleness: int


class SavedMark(TypedDict):
    """The fields of a ledger's `Mark`."""

    ledger: str
    offset: int
    incarnation: int


class Snapshot(TypedDict):
    """issued, consumed, dropped: tickets, as in `Account`. live: groups on the edge, in ticket order. ledger: where it
    stood, None without one."""

    plan: SavedPlan
    incarnation: int
    step: int
    weights_step: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    live: list[LiveGroup]
    ledger: SavedMark | None


def at_start(plan: DataPlan) -> Snapshot:
    """Of a run that has done nothing yet."""
    return {
        "plan": saved_plan(plan),
        "incarnation": -1,
        "step": 0,
        "weights_step": 0,
        "issued": 0,
        "consumed": 0,
        "dropped": {},
        "live": [],
        "ledger": None,
    }


def saved_plan(plan: DataPlan) -> SavedPlan:
    return {
        "num_rows": plan.num_rows,
        "seed": plan.seed,
        "shuffle": plan.shuffle,
        "max_staleness": plan.max_staleness,
    }


def saved(group: Group) -> LiveGroup:
    """A group on the edge as JSON."""
    return {
        "ticket": cast(SavedTicket, asdict(group.ticket)),
        "complete": group.complete,
        "num_tokens": group.num_tokens,
        "failures": group.failures,
    }


def restored(group: LiveGroup) -> Group:
    """The inverse of `saved`."""
    return Group(Ticket(**group["ticket"]), group["complete"], group["num_tokens"], group["failures"])


def check_resumable(plan: DataPlan, snapshot: Snapshot) -> None:
    """Raises UserError where the plan is not one that can go on from the snapshot."""
    before, now = snapshot["plan"], saved_plan(plan)
    for key, then, wanted, option in (
        ("num_rows", before["num_rows"], now["num_rows"], "data.train_files"),
        ("seed", before["seed"], now["seed"], "data.seed"),
        ("shuffle", before["shuffle"], now["shuffle"], "data.shuffle"),
    ):
        if then != wanted:
            raise UserError(
                f"the checkpoint was made with {key}={then}, this run has {wanted}: rows would be trained twice or "
                f"skipped. Restore {option}, or start anew with trainer.resume_mode=never and another "
                "trainer.default_local_dir"
            )
    if snapshot["live"] and now["max_staleness"] < before["max_staleness"]:
        raise UserError(
            f"the checkpoint holds {len(snapshot['live'])} prompt groups drawn with max_staleness="
            f"{before['max_staleness']}, this run has {now['max_staleness']}: they would be staler than it allows. "
            "Restore async.max_staleness, or start anew with trainer.resume_mode=never and another "
            "trainer.default_local_dir"
        )
