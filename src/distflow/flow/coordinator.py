"""The coordinator: hands out tickets on credits, knows where every group is, and says when a step may be consumed."""

from collections import Counter
from dataclasses import asdict
from typing import cast

from distflow.flow.account import Account, AccountingError
from distflow.flow.credits import Credits
from distflow.flow.data_plan import DataPlan
from distflow.flow.edge import Choose, ExperienceEdge, smallest_prefix
from distflow.flow.ledger import Ledger, Mark
from distflow.flow.order import place
from distflow.flow.snapshot import SavedMark, Snapshot, at_start, check_resumable, restored, saved, saved_plan
from distflow.flow.ticket import Ticket, Version


class Coordinator:
    """Metadata only, with no task and no lock of its own: threads share it under a lock, processes through an actor.

    A group goes take_tickets → complete | drop | retry; a step goes ready → release, which makes its groups consumed
    and ends in a new version. Every move is journaled; one that cannot be made raises AccountingError naming the
    ticket. At staleness 0 every step consumes all that was drawn for it, so a release leaves nothing behind, and a run
    that goes on from one repeats what an uninterrupted run would do. Otherwise groups stay on the edge, and the cut
    lists them.
    """

    def __init__(
        self,
        plan: DataPlan,
        ledger: Ledger | None = None,
        snapshot: Snapshot | None = None,
        choose: Choose = smallest_prefix,
    ) -> None:
        """snapshot: goes on from it, with a ledger that was rolled back to `mark_of(snapshot)`. Groups that were
        complete at its cut are complete (whoever calls has their batches), those that ran then are handed out first,
        and those drawn after it are drawn again, all under the same tickets. Being killed with the process is no
        failure of a group: of its three attempts it uses up none.

        choose: the rule by which complete groups form a step.
        Raises UserError where the data, their order or the staleness are not those of the snapshot.
        """
        start = snapshot or at_start(plan)
        check_resumable(plan, start)
        self.plan = plan
        self._ledger = ledger
        self._incarnation = ledger.incarnation if ledger else start["incarnation"] + 1
        self.version = Version(self._incarnation, start["step"])
        self.weights_step = start["weights_step"]
        self._issued = start["issued"]
        self._consumed = start["consumed"]
        self._dropped = Counter(start["dropped"])
        self._credits = Credits(plan.max_concurrent or plan.consumer_batch, plan.max_staleness, plan.consumer_batch)
        self._edge = ExperienceEdge(
            plan.consumer_batch,
            next_step=self.step,
            max_tickets=plan.max_num_gen_batches and plan.max_num_gen_batches * plan.consumer_batch,
            when_exhausted=plan.when_exhausted,
            choose=choose,
        )
        for group in start["live"]:
            self._edge.restore(restored(group))
        self._close_at_end()
        if ledger and ledger.inherits:
            self._journal_inheritance(start)
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
        """The groups to start now: those that were lost and wait for another attempt, then new ones, each in ticket
        order. At staleness 0 they come in waves, empty while the last one runs or the step is full.

        served_step: the lowest step that an engine serves, where one lags behind the last released step.
        """
        if self.finished:
            return []
        served = self.step if served_step is None else served_step
        tickets = [self._edge.reissue(number, served) for number in self._lost_to_start(served)]
        for number in range(self._issued, self._issued + self._num_new(served)):
            epoch, row = place(number, self.plan.num_rows, self.plan.seed, self.plan.shuffle)
            tickets.append(Ticket(number, epoch, row, self.plan.group_size, served))
            self._edge.issue(tickets[-1])
            self._issued += 1
        for ticket in tickets:
            self._journal_issue(ticket)
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

    def retry(self, number: int) -> bool:
        """A group was lost while the run goes on: with the engine or the process that worked on it.

        Returns whether it waits for `take_tickets` to hand it out again. If not, this was its third attempt and it is
        dropped as quarantined.
        """
        waits = self._edge.retry(number)
        if not waits:
            self.drop(number, "quarantined")
        return waits

    def ready(self, step: int) -> tuple[int, ...] | None:
        """Numbers of the tickets that form `step`, ascending, or None while it waits for groups; see
        `ExperienceEdge.ready` for short steps. Raises Exhausted."""
        return self._edge.ready(step)

    def release(self, step: int, published: bool = True) -> Version:
        """The step is consumed and ends in a new version, on the disk when this returns. The account is checked.

        published: whether new weights were sent; if not, the version is an alias of the last ones that were.
        """
        groups = self._edge.release(step)
        assert self.plan.max_staleness or not self._edge.live, "at staleness 0 a step leaves nothing behind"
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

    def snapshot(self) -> Snapshot:
        """JSON to go on from. The cut is the last release (or the start), whatever has happened since."""
        return self._cut

    def _close_at_end(self) -> None:
        if self._left() == 0:
            self._edge.close()

    def _left(self) -> int | None:
        """Tickets that may still be issued, None for no bound."""
        return None if self.plan.total_tickets is None else max(0, self.plan.total_tickets - self._issued)

    def _lost_to_start(self, served_step: int) -> list[int]:
        """Lost groups that may start now, never on weights older than those that they were to have."""
        waiting = self._edge.waiting
        num_free = self._credits.restarts(self._edge.num_running - len(waiting))
        return [ticket.number for ticket in waiting if ticket.version <= served_step][:num_free]

    def _num_new(self, served_step: int) -> int:
        """Tickets to issue now: none for steps that the run does not have."""
        plan, complete = self.plan, self._edge.num_complete
        served_step = min(served_step, plan.total_steps - 1 - plan.max_staleness)
        opened = self._credits.open(self._edge.num_running, served_step, self.step * plan.consumer_batch + complete)
        left = self._left()
        return self._edge.room(opened if left is None else min(opened, left))

    def _describe(self) -> Snapshot:
        return {
            "plan": saved_plan(self.plan),
            "incarnation": self._incarnation,
            "step": self.step,
            "weights_step": self.weights_step,
            "issued": self._issued,
            "consumed": self._consumed,
            "dropped": dict(self._dropped),
            "live": [saved(group) for group in self._edge.live],
            "ledger": cast(SavedMark, asdict(self._ledger.mark())) if self._ledger else None,
        }

    def _journal(self, kind: str, **fields: object) -> None:
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

    def _journal_inheritance(self, start: Snapshot) -> None:
        live = [
            {"ticket": group["ticket"]["number"], "attempt": group["ticket"]["attempt"], "complete": group["complete"]}
            for group in start["live"]
        ]
        counts = {key: start[key] for key in ("step", "issued", "consumed", "dropped")}
        self._journal("inherited", **counts, **({"live": live} if live else {}))

    def _check(self) -> None:
        account = self.accounting()
        account.check()
        if self._ledger and self._ledger.account != account:
            raise AccountingError(f"the ledger counts {self._ledger.account}, the coordinator {account}")


def mark_of(snapshot: Snapshot) -> Mark | None:
    """Where the ledger stood at the snapshot's cut: what a `Ledger` is to be rolled back to."""
    return Mark(**snapshot["ledger"]) if snapshot["ledger"] else None
