"""The coordinator: hands out tickets on credits, knows where every group is, and says when a step may be consumed."""

from collections import Counter, deque
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from typing import cast

from distflow.flow.account import Account, AccountingError, DomainAccount
from distflow.flow.credits import Credits
from distflow.flow.data_plan import DataPlan
from distflow.flow.draws import Draws
from distflow.flow.edge import ExperienceEdge, still_consumable
from distflow.flow.lane import Group
from distflow.flow.ledger import Ledger, Mark
from distflow.flow.order import place
from distflow.flow.quotas import Quotas
from distflow.flow.record import Quota
from distflow.flow.room import Room
from distflow.flow.snapshot import (
    SavedDomain,
    SavedMark,
    Snapshot,
    at_start,
    check_resumable,
    restored,
    saved,
    saved_plan,
)
from distflow.flow.tally import STALE
from distflow.flow.ticket import Ticket, Version, domain_of, stream_of

LOST = "lost"
"""Why a group of an offered row is dropped: its process ended before it did, and the row with it."""


class Coordinator:
    """Metadata only, with no task and no lock of its own: threads share it under a lock, processes through an actor.

    A group goes take_tickets → complete | drop | retry; a step goes ready → release, which makes its groups consumed
    and ends in a new version. Every move is journaled; one that cannot be made raises AccountingError naming the
    ticket. At staleness 0 every step consumes all that was drawn for it, so a release leaves nothing behind (but what a
    run of more staleness had begun), and a run that goes on from one repeats what an uninterrupted run would do.
    Otherwise groups stay on the edge, and the cut lists them.

    Of several domains each has its own order, epoch and position, and its places in every step (`flow.quotas`): a new
    ticket is of the domain whose next place without a group comes first, so that what takes the place of a dropped one
    is of its domain.

    Tickets are of rows of the data set, and of rows that somebody offers: these have the row numbers behind the data
    set's, and go first. data_open: whether tickets of the data set are handed out; they may not be wanted yet.

    Versions here are steps: version v are the weights after v steps, or those before under a new number where nothing
    was updated. A step that sent no weights although it changed them leaves the engines where they were.
    """

    def __init__(self, plan: DataPlan, ledger: Ledger | None = None, snapshot: Snapshot | None = None) -> None:
        """snapshot: goes on from it, with a ledger that was rolled back to `mark_of(snapshot)`. Groups that were
        complete at its cut are complete (whoever calls has their batches), those that ran then are handed out first,
        and those drawn after it are drawn again, all under the same tickets. Being killed with the process is no
        failure of a group: of its three attempts it uses up none.

        Staleness and batch size may be others than the snapshot's: complete groups that no step can consume in time any
        more are dropped as stale, and `holds` is false of them. Raises UserError where the data or their order are not
        those of the snapshot.
        """
        start = snapshot or at_start(plan)
        check_resumable(plan, start)
        self.plan = plan
        self._ledger = ledger
        self._incarnation = ledger.incarnation if ledger else start["incarnation"] + 1
        self.version = Version(self._incarnation, start["step"])
        self.weights_step = start["step"]  # a run that goes on begins by sending what it goes on from
        self._issued = start["issued"]
        self._num_offered = self._num_drawn_offered = start.get("offered", 0)
        self._offered = deque[int]()  # rows that wait for a credit
        self.data_open = True
        self._consumed = start["consumed"]
        self._dropped = Counter(start["dropped"])
        before = start.get("domains", {})
        self._domains = {
            name: DomainAccount(each["issued"], each["consumed"], each["dropped"])
            for name, each in before.items()
            if each["issued"]
        }
        self._quotas = Quotas(
            plan.consumer_batch,
            self.step,
            plan.shares,
            [Fraction(before[source.name]["lag"]) for source in plan.sources] if before else None,
        )
        max_concurrent = plan.max_concurrent or (plan.max_staleness + 1) * plan.consumer_batch
        self._credits = Credits(max_concurrent, plan.max_staleness, plan.consumer_batch)
        batches = plan.max_num_gen_batches
        sources = range(0 if batches is None else len(plan.sources))
        self._draws = [Draws(batches or 0, self.step, partial(self._quotas.in_all, number)) for number in sources]
        self._room = Room(plan.max_held_bytes)
        self._served = self.step
        self._asked = False  # for tickets, since the last release
        self._edge = ExperienceEdge(
            plan.consumer_batch,
            max_staleness=plan.max_staleness,
            next_step=self.step,
            when_exhausted=plan.when_exhausted,
            quotas=self._quotas,
            domains=[source.name for source in plan.sources],
        )
        quotas = {"quotas": self._shown_quotas()} if plan.domains else {}
        self._journal("plan", max_staleness=plan.max_staleness, consumer_batch=plan.consumer_batch, **quotas)
        if ledger and ledger.inherits:
            self._journal_inheritance(start)
        self._restore([restored(group) for group in start["live"]])
        self._close_at_end()
        self._check()
        self._cut = self._describe()

    @property
    def step(self) -> int:
        """The step to be consumed next."""
        return self.version.step

    @property
    def finished(self) -> bool:
        """Whether no step is left: all were consumed, or the data ended and nothing of it is left on the edge."""
        return self.step >= self.plan.total_steps or (self._edge.closed and not self._edge.num_live)

    def take_tickets(self, served_step: int | None = None) -> list[Ticket]:
        """The groups to start now: those that were lost and wait for another attempt, then new ones, each in ticket
        order. At staleness 0 they come in waves, empty while the last one runs or the step is full.

        served_step: the lowest version that an engine serves, None for that of the last release. One whose step is not
        released yet counts as the one before. Raises AccountingError where versions go backwards, or ahead of the
        steps.
        """
        served = self._see(self.step if served_step is None else served_step)
        if self.finished:
            return []
        tickets = [self._edge.reissue(number, served) for number in self._lost_to_start(served)]
        for source in self._new(served):
            tickets.append(self._next_ticket(source, served))
            self._edge.issue(tickets[-1])
            self._issued += 1
            if self._draws:
                self._draws[source].issue(served + self.plan.max_staleness)
        for ticket in tickets:
            self._journal_issue(ticket)
        self._close_at_end()
        return tickets

    def assign(self, number: int, worker: str) -> None:
        """`worker` works on the group from now on: it is journaled, and nothing else follows from it."""
        self._journal("assigned", ticket=number, worker=worker)

    def offer(self) -> int:
        """Somebody has a row of his own to be answered; the number that its ticket will name it by. Not of a run with
        domains, which have all places."""
        assert not self.plan.domains
        row = self.plan.num_rows + self._num_offered
        self._num_offered += 1
        self._offered.append(row)
        self._edge.close(False)
        return row

    @property
    def num_offered(self) -> int:
        """Rows that were offered and have no ticket yet."""
        return len(self._offered)

    def complete(self, number: int, num_tokens: int, version: int | None = None) -> None:
        """A group has passed its rewards and filters. num_tokens: of all its samples, prompts included. version: the
        lowest of any of their tokens, None for that of its ticket."""
        group = self._edge.complete(number, num_tokens, version)
        self._journal("complete", ticket=number, tokens=num_tokens, version=group.version)

    def weigh(self, number: int, num_bytes: int) -> None:
        """What a complete group takes of the memory that `plan.max_held_bytes` bounds: known to who holds it alone."""
        self._room.weigh(number, num_bytes)

    def drop(self, number: int, reason: str) -> None:
        """A group leaves without being trained on. Its ticket is spent, its credit comes back."""
        group = self._edge.drop(number, reason)
        self._journal("dropped", ticket=number, reason=reason)
        self._count_dropped(group.ticket, reason)

    def retry(self, number: int) -> bool:
        """A group was lost while the run goes on: with the engine or the process that worked on it.

        Returns whether it waits for `take_tickets` to hand it out again. If not, this was its third attempt and it is
        dropped as quarantined.
        """
        waits = self._edge.retry(number)
        if not waits:
            self.drop(number, "quarantined")
        return waits

    def lose(self, number: int) -> None:
        """What was made of a complete group that no step has taken is gone with the process that held it: the group
        waits to be handed out again, and of its three attempts this uses up none."""
        self._edge.lose(number)
        self._journal("lost", ticket=number)

    def ready(self, step: int) -> tuple[int, ...] | None:
        """Numbers of the tickets that form `step`, ascending, or None while it waits for groups; see
        `ExperienceEdge.ready` for short steps. Raises Exhausted, and AccountingError where a group of it is staler than
        the plan allows."""
        numbers = self._edge.ready(step, exhausted=self._is_spent())
        if numbers is None and self._is_stuck():
            raise AccountingError(
                f"step {step} can get no groups: the weights that are served are of version {self._served}, "
                f"max_staleness is {self.plan.max_staleness}, and no later version was sent"
            )
        return numbers

    def part(self, step: int, wanted: int) -> tuple[int, ...] | None:
        """Numbers of `wanted` more tickets of a step that is taken in parts, ascending; see `ExperienceEdge.part`.

        A step that is taken so must have taken all that it owes (`num_owed`) when it is released.
        """
        return self._edge.part(step, wanted, exhausted=self._edge.num_taken == 0 and self._is_spent())

    def untake(self) -> None:
        """The step that is formed could not be read: its groups wait again, and those that are gone can be lost."""
        self._edge.untake()

    def num_owed(self) -> int:
        """See `ExperienceEdge.num_owed`."""
        return self._edge.num_owed()

    @property
    def num_untaken(self) -> int:
        """Complete groups that no step has taken yet."""
        return self._edge.num_untaken

    @property
    def untaken(self) -> list[int]:
        """See `ExperienceEdge.untaken`."""
        return self._edge.untaken

    @property
    def stalled(self) -> bool:
        """Whether no group runs, and none will start before a step is released or a row is offered."""
        return self._asked and not self._edge.num_running and not self._new(min(self._served, self.step))

    def holds(self, number: int) -> bool:
        """Whether the group is complete and waits for its step: its batch is to be kept."""
        return self._edge.holds(number)

    def release(self, step: int, published: bool = True) -> Version:
        """The step is consumed and ends in a new version, on the disk when this returns. The account is checked.

        published: whether new weights were sent; if not, the version is an alias of the last ones that were, or the
        engines go on serving an older one. What they serve then is told to `take_tickets`; whoever gives them the alias
        does so before this.
        """
        self.ready(step)
        groups = self._edge.release(step)
        left = self._edge.num_live - self._edge.num_waiting
        assert self.plan.max_staleness or not left, "at staleness 0 a step leaves nothing behind that has started"
        numbers = [group.ticket.number for group in groups]
        self._consumed += len(numbers)
        for group in groups:
            if name := domain_of(group.ticket.stream):
                self._domains[name] = replace(self._domains[name], consumed=self._domains[name].consumed + 1)
        self._room.keep(self._edge.holds)
        self.version = Version(self._incarnation, step + 1)
        self.weights_step = step + 1 if published else self.weights_step
        self._asked = False
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
            domains=dict(self._domains),
        )

    def snapshot(self) -> Snapshot:
        """JSON to go on from. The cut is the last release (or the start), whatever has happened since."""
        return self._cut

    def _close_at_end(self) -> None:
        if self.data_open and self._left() == 0:
            self._edge.close()

    def _left(self) -> int | None:
        """Tickets that may still be issued, None for no bound."""
        if not self.data_open:
            return len(self._offered)
        if self.plan.total_tickets is None:
            return None
        return len(self._offered) + max(0, self.plan.total_tickets - self._num_drawn)

    @property
    def _num_drawn(self) -> int:
        """Tickets of rows of the data set."""
        return self._issued - self._num_drawn_offered

    def _next_ticket(self, source: int, served: int) -> Ticket:
        """The next new one of the source."""
        plan, number = self.plan, self._issued
        if self._offered:
            self._num_drawn_offered += 1
            return Ticket(number, 0, self._offered.popleft(), plan.group_size, served)
        if not plan.domains:
            return Ticket(
                number, *place(self._num_drawn, plan.num_rows, plan.seed, plan.shuffle), plan.group_size, served
            )
        domain = plan.domains[source]
        account = self._domains.get(domain.name, DomainAccount())
        self._domains[domain.name] = replace(account, issued=account.issued + 1)
        epoch, row = place(account.issued, domain.num_rows, plan.seed, plan.shuffle, domain.name)
        row += sum(other.num_rows for other in plan.domains[:source])
        stream = stream_of(domain.name)
        return Ticket(number, epoch, row, plan.group_size, served, stream=stream, position=account.issued)

    def _see(self, served_step: int) -> int:
        """Take note of the version that is served now; the one to issue tickets with."""
        if not self._served <= served_step <= self.step + 1:
            raise AccountingError(
                f"an engine serves version {served_step}, but version {self._served} was served already and step "
                f"{self.step} is the next one: versions never go backwards, nor ahead of the steps"
            )
        self._served, self._asked = served_step, True
        return min(served_step, self.step)

    def _is_spent(self) -> bool:
        """Whether no ticket can be drawn before the next step is consumed, of a source that it lacks groups of: all
        were that may be at the version served, and no later version is on its way."""
        if not self._draws or not self._knows_last_version():
            return False
        due, lanes = min(self._served, self.step) + self.plan.max_staleness, list(self._edge.lanes.values())
        lacking = [draws for draws, lane in zip(self._draws, lanes, strict=True) if lane.num_untaken < lane.num_wanted]
        return all(draws.room(due) == 0 for draws in lacking or self._draws)

    def _is_stuck(self) -> bool:
        """Whether nothing runs and nothing may start before the next step is consumed, for want of newer weights."""
        if self._edge.num_running or self._edge.closed or not self._knows_last_version():
            return False
        return self._open(0, self._served) == 0

    def _knows_last_version(self) -> bool:
        """Whether the version seen last is the last one before the next step is consumed."""
        return self._asked and self._served >= self.weights_step

    def _lost_to_start(self, served: int) -> list[int]:
        num_credits = self._open(self._num_started, served)
        if not num_credits or not self._edge.num_waiting:
            return []
        room = {lane: lane.room(self._last_step(served)) + len(lane.waiting) for lane in self._edge.lanes.values()}
        started = list[int]()
        for number in self._edge.waiting[: None if self.plan.domains else num_credits]:
            lane = self._edge.lane_of(number)
            if room[lane] > 0 and len(started) < num_credits:
                room[lane] -= 1
                started.append(number)
        return started

    def _new(self, served: int) -> list[int]:
        """Tickets to issue now, each by its source. Where memory is full these are the ones that the next step waits
        for, and no other."""
        lanes = list(self._edge.lanes.values())
        room = [lane.room(self._last_step(served)) for lane in lanes]
        if self._draws:
            due = served + self.plan.max_staleness
            room = [min(own, draws.room(due)) for own, draws in zip(room, self._draws, strict=True)]
        room = [max(0, own) for own in room]
        bounds = [self._open(self._num_started, served), sum(room)]
        if (left := self._room.left(self._edge.num_running)) is not None:
            bounds.append(max(left, sum(max(0, lane.room(self.step)) for lane in lanes)))
        if (left := self._left()) is not None:
            bounds.append(left)
        return self._by_place([lane.num_live for lane in lanes], room, min(bounds))

    def _by_place(self, filled: list[int], room: list[int], count: int) -> list[int]:
        """The sources of the first `count` places without a group. filled, room: by source, places with one, and more
        that may have one."""
        if len(filled) == 1:
            return [0] * count
        last = [full + more for full, more in zip(filled, room, strict=True)]
        chosen = list[int]()
        while len(chosen) < count:
            open_ones = (source for source, full in enumerate(filled) if full < last[source])
            chosen.append(min(open_ones, key=lambda source: self._quotas.place(source, filled[source])))
            filled[chosen[-1]] += 1
        return chosen

    @property
    def _num_started(self) -> int:
        return self._edge.num_running - self._edge.num_waiting

    def _last_step(self, served: int) -> int:
        """The last that groups which start now may be for."""
        return min(served + self.plan.max_staleness, self.plan.total_steps - 1)

    def _open(self, running: int, served: int) -> int:
        """Credits: none for steps that the run does not have."""
        plan, version = self.plan, self._last_step(served) - self.plan.max_staleness
        return self._credits.open(running, version, self.step * plan.consumer_batch + self._edge.num_complete)

    def _restore(self, groups: list[Group]) -> None:
        complete = [group for group in groups if group.complete]
        fit, stale = list[Group](), list[Group]()
        for number, source in enumerate(self.plan.sources):
            own = [group for group in complete if domain_of(group.ticket.stream) == source.name]
            parts = still_consumable(own, self.plan.max_staleness, partial(self._quotas.up_to, number))
            fit += parts[0]
            stale += parts[1]
        running = [group for group in groups if not group.complete]
        lost = [group for group in running if group.ticket.row >= self.plan.num_rows]
        for group in [*fit, *(group for group in running if group not in lost)]:
            self._edge.restore(group)
        for group, reason in [*((group, STALE) for group in stale), *((group, LOST) for group in lost)]:
            self._journal("dropped", ticket=group.ticket.number, reason=reason)
            self._count_dropped(group.ticket, reason)

    def _count_dropped(self, ticket: Ticket, reason: str) -> None:
        self._dropped[reason] += 1
        if name := domain_of(ticket.stream):
            account = self._domains[name]
            dropped = {**account.dropped, reason: account.dropped.get(reason, 0) + 1}
            self._domains[name] = replace(account, dropped=dropped)

    def _shown_quotas(self) -> dict[str, Quota]:
        """As a record has them."""
        known = zip(self.plan.domains, self.plan.shares, self._quotas.lags, strict=True)
        return {domain.name: {"share": str(share), "lag": str(lag)} for domain, share, lag in known}

    def _saved_domains(self) -> dict[str, SavedDomain]:
        saved: dict[str, SavedDomain] = {}
        for domain, lag in zip(self.plan.domains, self._quotas.lags, strict=True):
            account = self._domains.get(domain.name, DomainAccount())
            counts = {"issued": account.issued, "consumed": account.consumed, "dropped": dict(account.dropped)}
            saved[domain.name] = cast(SavedDomain, {**counts, "lag": str(lag)})
        return saved

    def _describe(self) -> Snapshot:
        described: Snapshot = {
            "plan": saved_plan(self.plan),
            "incarnation": self._incarnation,
            "step": self.step,
            "issued": self._issued,
            "offered": self._num_drawn_offered,
            "consumed": self._consumed,
            "dropped": dict(self._dropped),
            "live": [saved(group) for group in self._edge.live],
            "ledger": cast(SavedMark, asdict(self._ledger.mark())) if self._ledger else None,
        }
        if self.plan.domains:
            described["domains"] = self._saved_domains()
        return described

    def _journal(self, kind: str, **fields: object) -> None:
        if self._ledger:
            self._ledger.append(kind, **fields)

    def _journal_issue(self, ticket: Ticket) -> None:
        name = domain_of(ticket.stream)
        self._journal(
            "issued",
            ticket=ticket.number,
            epoch=ticket.epoch,
            row=ticket.row,
            version=ticket.version,
            attempt=ticket.attempt,
            **({"domain": name} if name else {}),
        )

    def _journal_inheritance(self, start: Snapshot) -> None:
        live = [
            {
                "ticket": group.ticket.number,
                "attempt": group.ticket.attempt,
                "complete": group.complete,
                "version": group.ticket.version if group.version is None else group.version,
                **({"domain": name} if (name := domain_of(group.ticket.stream)) else {}),
            }
            for group in map(restored, start["live"])
        ]
        counts = {key: start[key] for key in ("step", "issued", "consumed", "dropped")}
        domains = {name: asdict(account) for name, account in self._domains.items()}
        listed = {"live": live, "domains": domains}
        self._journal("inherited", **counts, **{key: value for key, value in listed.items() if value})

    def _check(self) -> None:
        account = self.accounting()
        account.check()
        if self._ledger and self._ledger.account != account:
            raise AccountingError(f"the ledger counts {self._ledger.account}, the coordinator {account}")


def mark_of(snapshot: Snapshot) -> Mark | None:
    """Where the ledger stood at the snapshot's cut: what a `Ledger` is to be rolled back to."""
    return Mark(**snapshot["ledger"]) if snapshot["ledger"] else None
