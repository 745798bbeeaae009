"""The coordinator: hands out tickets on credits, knows where every group is, and says when a step may be consumed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from distflow.config.errors import UserError
from distflow.flow.account import Account, AccountingError
from distflow.flow.credits import Credits
from distflow.flow.edge import ExperienceEdge
from distflow.flow.ledger import Ledger, Mark
from distflow.flow.order import place
from distflow.flow.ticket import Ticket, Version

MAX_ATTEMPTS = 3
"""Attempts of a group after which it is dropped as quarantined."""


@dataclass(frozen=True)
class DataPlan:
    """What a run draws from its data, and when it ends: after `total_tickets` or `total_steps`, what comes first.
    Without `total_tickets` the data go round as often as the steps take.

    group_size: samples a prompt. consumer_batch: prompt groups a step.
    max_concurrent: groups that may run at once. max_num_gen_batches: bound on the tickets of a step, in batches.
    """

    num_rows: int
    consumer_batch: int
    group_size: int
    total_tickets: int | None
    total_steps: int
    seed: int = 1
    shuffle: bool = True
    max_concurrent: int | None = None
    max_num_gen_batches: int | None = None
    when_exhausted: Literal["error", "continue"] = "error"

    def __post_init__(self) -> None:
        assert min(self.num_rows, self.consumer_batch, self.group_size) > 0
        assert self.max_num_gen_batches is None or self.max_num_gen_batches > 0


_START: Mapping[str, Any] = {
    "incarnation": -1,
    "step": 0,
    "weights_step": 0,
    "issued": 0,
    "consumed": 0,
    "dropped": {},
}


class Coordinator:
    """Metadata only, with no task and no lock of its own: threads share it under a lock, processes through an actor.

    A group goes take_tickets → complete | drop | retry; a step goes ready → release, which makes its groups consumed
    and ends in a new version. Every move is journaled; one that cannot be made raises AccountingError naming the
    ticket. Staleness is 0 here: every step consumes all that was drawn for it, so a release leaves nothing behind,
    and a run that goes on from one repeats what an uninterrupted run would do.
    """

    def __init__(self, plan: DataPlan, ledger: Ledger | None = None, snapshot: Mapping[str, Any] | None = None) -> None:
        """snapshot: goes on from it, with a ledger that was rolled back to `mark_of(snapshot)`: groups drawn after its
        cut are drawn again, under the same tickets.

        Raises UserError where the data or their order are not those of the snapshot.
        """
        if snapshot:
            _check_same_data(plan, snapshot)
        start = snapshot or _START
        self.plan = plan
        self._ledger = ledger
        self._incarnation: int = ledger.incarnation if ledger else start["incarnation"] + 1
        self.version = Version(self._incarnation, start["step"])
        self.weights_step: int = start["weights_step"]
        self._issued: int = start["issued"]
        self._consumed: int = start["consumed"]
        self._dropped: Counter[str] = Counter(start["dropped"])
        self._edge = ExperienceEdge(
            plan.consumer_batch,
            next_step=self.step,
            max_tickets=plan.max_num_gen_batches and plan.max_num_gen_batches * plan.consumer_batch,
            when_exhausted=plan.when_exhausted,
        )
        self._close_at_end()
        if ledger and ledger.inherits:
            ledger.append("inherited", **{key: start[key] for key in ("step", "issued", "consumed", "dropped")})
        self._check()
        self._cut = self._describe()

    @property
    def step(self) -> int:
        """The step to be consumed next."""
        return self.version.step

    @property
    def finished(self) -> bool:
        """Whether no step is left: all were consumed, or the data ended and nothing of it is left on the edge."""
        return self.step >= self.plan.total_steps or (self._edge.closed and not self._edge.live)

    def take_tickets(self, served_step: int | None = None) -> list[Ticket]:
        """The groups to start now, in ticket order: a wave, empty while the last one runs or the step is full.

        served_step: the lowest step that an engine serves, where one lags behind the last released step.
        """
        num_new = self._credits(self.step if served_step is None else served_step)
        tickets = [self._ticket(self._issued + i) for i in range(num_new)]
        for ticket in tickets:
            self._journal_issue(ticket)
            self._edge.issue(ticket)
        self._issued += num_new
        self._close_at_end()
        return tickets

    def complete(self, number: int, num_tokens: int) -> None:
        """A group has passed its rewards and filters. num_tokens: of all its samples, prompts included."""
        self._edge.complete(number, num_tokens)
        self._journal("complete", ticket=number, tokens=num_tokens)

    def drop(self, number: int, reason: str) -> None:
        """A group leaves without being trained on. Its ticket is spent, its credit comes back."""
        self._edge.drop(number, reason)
        self._journal("dropped", ticket=number, reason=reason)
        self._dropped[reason] += 1

    def retry(self, number: int) -> Ticket | None:
        """A group was lost in a crash: the ticket to start it again, or None where it is dropped as quarantined."""
        ticket = self._edge.running(number)
        if ticket.attempt + 1 >= MAX_ATTEMPTS:
            self.drop(number, "quarantined")
            return None
        ticket = replace(ticket, version=self.step, attempt=ticket.attempt + 1)
        self._edge.reissue(ticket)
        self._journal_issue(ticket)
        return ticket

    def ready(self, step: int) -> tuple[int, ...] | None:
        """Numbers of the tickets that form `step`, ascending, or None while it waits for groups; see
        `ExperienceEdge.ready` for short steps. Raises Exhausted."""
        return self._edge.ready(step)

    def release(self, step: int, published: bool = True) -> Version:
        """The step is consumed and ends in a new version, on the disk when this returns. The account is checked.

        published: whether new weights were sent; if not, the version is an alias of the last ones that were.
        """
        groups = self._edge.release(step)
        assert not self._edge.live, "at staleness 0 a step leaves nothing behind"
        numbers = [group.ticket.number for group in groups]
        self._consumed += len(numbers)
        self.version = Version(self._incarnation, step + 1)
        self.weights_step = step + 1 if published else self.weights_step
        self._journal("consumed", step=step, tickets=numbers, tokens=sum(group.num_tokens for group in groups))
        self._journal("version", step=step + 1, weights=self.weights_step)
        if self._ledger:
            self._ledger.sync()
        self._check()
        self._cut = self._describe()
        return self.version

    def accounting(self) -> Account:
        return Account(
            issued=self._issued,
            running=self._edge.num_running,
            complete=self._edge.num_complete,
            consumed=self._consumed,
            dropped=dict(self._dropped),
        )

    def snapshot(self) -> dict[str, Any]:
        """JSON to go on from. The cut is the last release (or the start), whatever has happened since."""
        return self._cut

    def _close_at_end(self) -> None:
        if self._left() == 0:
            self._edge.close()

    def _left(self) -> int | None:
        """Tickets that may still be issued, None for no bound."""
        return None if self.plan.total_tickets is None else max(0, self.plan.total_tickets - self._issued)

    def _credits(self, served_step: int) -> int:
        if self.step >= self.plan.total_steps:
            return 0
        plan, running, complete = self.plan, self._edge.num_running, self._edge.num_complete
        credits = Credits(plan.max_concurrent or plan.consumer_batch, 0, plan.consumer_batch)
        opened = credits.open(running, served_step, self.step * plan.consumer_batch + complete)
        left = self._left()
        return self._edge.room(max(0, opened if left is None else min(opened, left)))

    def _ticket(self, number: int) -> Ticket:
        plan = self.plan
        epoch, row = place(number, plan.num_rows, plan.seed, plan.shuffle)
        return Ticket(number, epoch, row, plan.group_size, self.step)

    def _describe(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "plan": {"num_rows": plan.num_rows, "seed": plan.seed, "shuffle": plan.shuffle},
            "incarnation": self._incarnation,
            "step": self.step,
            "weights_step": self.weights_step,
            "issued": self._issued,
            "consumed": self._consumed,
            "dropped": dict(self._dropped),
            "ledger": asdict(self._ledger.mark()) if self._ledger else None,
        }

    def _journal(self, kind: str, **fields: Any) -> None:
        if self._ledger:
            self._ledger.append(kind, **fields)

    def _journal_issue(self, ticket: Ticket) -> None:
        self._journal(
            "issued",
            ticket=ticket.number,
            epoch=ticket.epoch,
            row=ticket.row,
            version=ticket.version,
            attempt=ticket.attempt,
        )

    def _check(self) -> None:
        account = self.accounting()
        account.check()
        if self._ledger and self._ledger.account != account:
            raise AccountingError(f"the ledger counts {self._ledger.account}, the coordinator {account}")


def _check_same_data(plan: DataPlan, snapshot: Mapping[str, Any]) -> None:
    for key, option in (("num_rows", "data.train_files"), ("seed", "data.seed"), ("shuffle", "data.shuffle")):
        before, now = snapshot["plan"][key], getattr(plan, key)
        if before != now:
            raise UserError(
                f"the checkpoint was made with {key}={before}, this run has {now}: rows would be trained twice or "
                f"skipped. Restore {option}, or start anew with trainer.resume_mode=never and another "
                "trainer.default_local_dir"
            )


def mark_of(snapshot: Mapping[str, Any]) -> Mark | None:
    """Where the ledger stood at the snapshot's cut: what a `Ledger` is to be rolled back to."""
    return Mark(**snapshot["ledger"]) if snapshot["ledger"] else None
